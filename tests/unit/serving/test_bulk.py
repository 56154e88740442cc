"""Background responses, batches, and very many prompts in one request leave seats to whoever waits."""

import asyncio
import time

import pytest

from tests.serving import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = {"max_tokens": 150, "ignore_eos": True}


async def in_background(client):
    for _ in range(40):
        body = {"input": "hello", "background": True, "max_output_tokens": 150, "ignore_eos": True}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text


async def of_many_prompts(client):
    await client.post("/v1/completions", json={"prompt": ["hello"] * 40, **LONG})


@pytest.mark.parametrize("crowd", [in_background, of_many_prompts])
async def test_a_crowd_leaves_seats(crowd):
    async with served(step_s=0.01, max_num_seqs=8, front={"max_num_queued_reqs": -1}) as server:
        task = asyncio.create_task(crowd(server.client))
        await asyncio.sleep(1.0)
        began_s = time.monotonic()
        body = {"prompt": "now", "max_tokens": 3}
        answers = await asyncio.gather(*(server.client.post("/v1/completions", json=body) for _ in range(4)))
        took_s = time.monotonic() - began_s
        assert [answer.status_code for answer in answers] == [200] * 4
        assert took_s < 1.0, "a round of the crowd takes 1.5 s"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
