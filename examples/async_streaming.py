"""Two answers streamed side by side from an engine in its own process."""

import asyncio

from octavo import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(prompt, params, request_id):
        for completion in output.outputs:
            text += completion.text
            print(f"[{request_id}] {completion.text!r}")
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs())
    try:
        texts = await asyncio.gather(
            stream(engine, "The future of artificial intelligence is", "one"),
            stream(engine, "Once upon a time", "two"),
        )
        assert all(texts)
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
