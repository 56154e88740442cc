"""A prompt that comes in pieces: each is answered at once, on top of all that came before."""

import asyncio
from collections.abc import AsyncIterator

from octavo import AsyncLLM, EngineArgs, SamplingParams, StreamingInput

PIECES = ["The capital of France is", "\nThe capital of Italy is", "\nThe capital of Spain is"]


async def listen() -> AsyncIterator[StreamingInput]:
    """Pieces as they come; here they wait for nobody."""
    for piece in PIECES:
        yield StreamingInput(piece)


async def main() -> None:
    """Print each turn: the prompt so far, which holds the earlier answers but for their last token."""
    engine = AsyncLLM.from_engine_args(EngineArgs(max_model_len=2048))
    tokenizer = await engine.get_tokenizer()
    assert tokenizer is not None
    try:
        async for output in engine.generate(listen(), SamplingParams(temperature=0, max_tokens=3)):
            answer = output.outputs[0]
            if answer.finish_reason and not output.finished:
                print(f"{tokenizer.decode(output.prompt_token_ids or [])!r} -> {answer.text!r}")
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
