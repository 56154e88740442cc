"""A trace of a few steps."""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(folder):
    llm = LLM(
        model="smollm2",
        tensor_parallel_size=1,
        profiler_config={"profiler": "torch", "torch_profiler_dir": folder},
    )
    llm.start_profile()
    outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3))
    llm.stop_profile()
    print(repr(outputs[0].outputs[0].text))
    print("traces:", len(list(Path(folder).iterdir())))


if __name__ == "__main__":
    main(sys.argv[1])
