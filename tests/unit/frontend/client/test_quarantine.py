"""A request that kills the engine twice is kept out; who was only there is not."""

import asyncio

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.client.quarantine import KEPT_OUT_S, Quarantine
from octavo.messages.sampling import SamplingParams
from tests.fakes import fake_request
from tests.serving import served

pytestmark = pytest.mark.asyncio
KILLER, PLAIN = [1, 2, 3], [4, 5]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


async def test_twice_at_the_same_place():
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.note_death([(fake_request("a", KILLER), 40), (fake_request("b", PLAIN), 3)])
    clock.now += 1
    quarantine.check([fake_request("c", KILLER), fake_request("d", PLAIN)])
    quarantine.note_death([(fake_request("e", KILLER), 41), (fake_request("f", PLAIN), 30)])
    with pytest.raises(RequestError, match="twice when the engine died"):
        quarantine.check([fake_request("g", PLAIN), fake_request("h", KILLER)])
    quarantine.check([fake_request("i", PLAIN)])
    quarantine.check([fake_request("j", KILLER, sampling=SamplingParams(top_k=3))])
    clock.now += KEPT_OUT_S + 1
    quarantine.check([fake_request("k", KILLER)])


async def test_whoever_ends_well_between_two_deaths_is_innocent():
    clock = Clock()
    quarantine = Quarantine(clock)
    for _ in range(4):
        clock.now += 1
        quarantine.note_death([(fake_request("a", KILLER), 0), (fake_request("b", PLAIN), 0)])
        assert quarantine.has_suspects
        quarantine.clear([fake_request("c", PLAIN)])
        quarantine.check([fake_request("d", PLAIN)])
    with pytest.raises(RequestError):
        quarantine.check([fake_request("e", KILLER)])


async def test_many_that_ask_the_same_at_one_death_are_not_two_deaths():
    quarantine = Quarantine()
    quarantine.note_death([(fake_request(f"r{i}", PLAIN), 0) for i in range(16)])
    quarantine.check([fake_request("a", PLAIN)])


async def test_a_client_that_repeats_a_deadly_request_does_not_end_the_server():
    async with served(deadly=ord("!"), on_crash="restart") as server:

        async def ask(prompt):
            return await server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})

        async def recovered():
            async with asyncio.timeout(30):
                while server.engine.core.health().state != "ready":
                    await asyncio.sleep(0.05)

        for _ in range(2):
            assert (await ask("kill!")).status_code == 503
            await recovered()
        for _ in range(8):
            answer = await ask("kill!")
            assert answer.status_code == 400 and "twice when the engine died" in answer.text
        assert (await ask("hello")).status_code == 200
        assert server.engine.core.health().num_restarts == 2
