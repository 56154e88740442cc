"""Every process that torchrun starts runs this and is a rank: torchrun --nproc-per-node=N torchrun.py"""

import torch.distributed as dist
from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = FlexibleArgumentParser()
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(
        model="smollm2",
        tensor_parallel_size=args.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        max_model_len=512,
        seed=1,
    )
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
    outputs = llm.generate(["Hello, my name is", "The capital of France is"] * 3, params, use_tqdm=False)
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [output.outputs[0].text for output in outputs])
    if dist.get_rank() == 0:
        print(f"ranks: {len(texts)}, texts of all ranks equal: {all(text == texts[0] for text in texts)}")


if __name__ == "__main__":
    main()
