"""Many requests at once with the asynchronous client: the server computes them in one batch."""

import asyncio
import time

from openai import AsyncOpenAI

PLACES = ["sea", "forest", "desert", "city", "mountain", "river", "moon", "garden"]


async def main() -> None:
    async with AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:

        async def ask(place: str) -> int:
            question = [{"role": "user", "content": f"Describe the {place}."}]
            answer = await client.chat.completions.create(model="smollm2", messages=question, max_tokens=24)
            return answer.usage.completion_tokens

        begun_s = time.monotonic()
        counts = await asyncio.gather(*map(ask, PLACES))
        print(f"{len(counts)} answers, {sum(counts) / (time.monotonic() - begun_s):.0f} tokens per second")


if __name__ == "__main__":
    asyncio.run(main())
