"""The same prompts without and with cached prefixes, in engines one after the other."""

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PREFIX = "You are the librarian of a small town. You know each book, its place and its readers. " * 8
PROMPTS = [
    PREFIX + end for end in ("Your favourite book is", "The shelf by the door holds", "Today a reader asks")
]


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def main():
    params = SamplingParams(temperature=0.0, max_tokens=8)
    plain = LLM(model="smollm2", enable_prefix_caching=False, gpu_memory_utilization=0.4)
    expected = texts(plain.generate(PROMPTS, params))
    del plain
    cleanup_dist_env_and_memory()
    cached = LLM(model="smollm2", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(PROMPTS[0], params)
    outputs = cached.generate(PROMPTS, params)
    print("cached tokens:", [output.num_cached_tokens for output in outputs])
    print("same answers:", texts(outputs) == expected)
    print("forgotten:", cached.reset_prefix_cache())


if __name__ == "__main__":
    main()
