"""Two ranks of a thread each on a CPU beside one: how long steps and prompts take, and what their sums cost.

python benchmarks/cpu_ranks.py

Of a model's shape with random weights in bfloat16: all engines live at once and take turns. "by torch": gloo
adds up, and steps are computed call by call, as before ranks mapped memory.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

from octavo import LLM, SamplingParams

_SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536,
    "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
SHAPES = {"135M": _SMALL}
WAYS = {
    "one": {},
    "two, by torch": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "two, call by call": {"tensor_parallel_size": 2, "enforce_eager": True},
    "two": {"tensor_parallel_size": 2},
}
BATCHES, PROMPT, TOKENS, ROUNDS = (1, 8), 512, 25, 4


def main() -> None:
    for shape, config in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            for row in rows(folder):
                print(json.dumps({"shape": shape, **row}), flush=True)


def rows(folder):
    """One of each way; the first round warms up."""
    common = {"cpu_threads": 1, "max_model_len": 1024, "num_gpu_blocks_override": 600, "load_format": "dummy"}
    common |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    engines = {way: LLM(folder, **common, **options) for way, options in WAYS.items()}
    steps = {(way, batch): [] for way in WAYS for batch in BATCHES}
    prompts, tokens = {way: [] for way in WAYS}, {}
    for number in range(ROUNDS):
        for (way, batch), times in steps.items():
            first_s, _ = ask(engines[way], batch, 1)
            whole_s, tokens[way, batch] = ask(engines[way], batch, TOKENS)
            if number:
                times.append(1e3 * (whole_s - first_s) / (TOKENS - 1))
                prompts[way] += [first_s] * (batch == BATCHES[-1])
    for way, engine in engines.items():
        times = {f"step_ms_{batch}": round(median(steps[way, batch]), 2) for batch in BATCHES}
        per_s = round(BATCHES[-1] * PROMPT / median(prompts[way]))
        same = all(tokens[way, batch] == tokens["one", batch] for batch in BATCHES)
        yield {"ranks": way, **times, "prompt_tokens_s": per_s, "same_tokens": same}
        engine.shutdown()


def ask(engine, batch, count):
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 900 + 5 for j in range(PROMPT)]} for i in range(batch)]
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun, [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
