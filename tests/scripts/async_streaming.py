"""Pieces of text as they are made, by the asynchronous engine."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine, prompt, request_id):
    params = SamplingParams(
        max_tokens=6, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        pieces += [completion.text for completion in output.outputs if completion.text]
        if output.finished:
            print(f"[{request_id}] {len(pieces)} pieces: {''.join(pieces)!r}")
            break


async def main():
    context = UsageContext.ENGINE_CONTEXT
    config = AsyncEngineArgs(model="smollm2", enforce_eager=True).create_engine_config(context)
    engine = AsyncLLM.from_vllm_config(vllm_config=config, usage_context=context)
    try:
        for number, prompt in enumerate(["The future of AI is", "In a galaxy far away"], 1):
            await stream(engine, prompt, f"stream-{number}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
