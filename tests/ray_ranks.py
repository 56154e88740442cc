"""Two ranks that Ray places give the tokens of one device; more than the cluster has are refused."""

import sys

import ray

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError


def main(model):
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 400}
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)

    def answer(**sizes):
        llm = LLM(model, **options, **sizes)
        output = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        llm.shutdown()
        return list(output[0].outputs[0].token_ids)

    print("equal:", answer() == answer(tensor_parallel_size=2, distributed_executor_backend="ray"))
    print("groups left:", sum(g["state"] == "CREATED" for g in ray.util.placement_group_table().values()))
    try:
        answer(tensor_parallel_size=6, distributed_executor_backend="ray")
    except ConfigError as error:
        print(error)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
