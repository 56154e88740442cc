"""The engine's loop driven by hand: requests come in while others run."""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run(engine: LLMEngine, prompts: list[tuple[str, SamplingParams]]):
    request_id = 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, sampling_params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(f"{request_output.request_id}: {[output.text for output in request_output.outputs]}")


def parse_args() -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(
        LLMEngine.from_engine_args(EngineArgs.from_cli_args(parse_args())),
        [
            ("A robot may not injure a human being", SamplingParams(temperature=0.0, max_tokens=6)),
            ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, max_tokens=6)),
            ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=6)),
        ],
    )
