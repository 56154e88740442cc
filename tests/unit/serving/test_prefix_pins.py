"""What is to stay in the cache does so until its time is over, under a flood of ten times the cache."""

import asyncio
import json

import pytest

from octavo.base.errors import ConfigError
from octavo.config.server import ServerConfig
from octavo.frontend.prefix_pins import preload_prefixes
from tests.serving import served

PINS = "/v1/prefix_cache/pins"
PROMPT = "a prompt that is long enough to fill some blocks of the cache"
NUM_CACHED = len(PROMPT) // 4 * 4
NUM_BLOCKS = 128
"""Of 4 tokens each."""
MARK = {"type": "ephemeral"}
SAID = {"type": "text", "text": "u" * 80}


@pytest.fixture
async def server():
    config = ServerConfig(dev_mode=True, enable_prompt_tokens_details=True)
    async with served(config, num_blocks=NUM_BLOCKS) as server:
        yield server


async def flood(server):
    """Ten times as many tokens as the cache has slots, none of them twice."""
    prompts = [f"{number:04d} is the number of this one, " + "x" * 100 for number in range(40)]
    body = {"prompt": prompts, "max_tokens": 1}
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] > 10 * 4 * NUM_BLOCKS


async def ask(server, prompt=PROMPT, **fields):
    """How many tokens of a prompt were in the cache."""
    body = {"prompt": prompt + "?", "max_tokens": 1, **fields}
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("fields", [{"retention_s": 60}, {"prefix_priority": 3}])
async def test_a_prompt_stays_under_a_flood(server, fields):
    assert await ask(server, **fields) == 0
    for _ in range(3):
        await flood(server)
        assert await ask(server) == NUM_CACHED


async def test_without_retention_it_goes(server):
    assert await ask(server) == 0
    assert await ask(server) == NUM_CACHED
    await flood(server)
    assert await ask(server) == 0


async def test_it_goes_when_its_time_is_over_and_use_begins_it_anew(server):
    await ask(server, retention_s=1.0)
    for _ in range(3):
        await asyncio.sleep(0.5)
        assert await ask(server) == NUM_CACHED
    await asyncio.sleep(1.1)
    await flood(server)
    assert await ask(server) == 0


async def test_of_two_the_one_of_less_priority_goes(server):
    long = "y" * 200
    await ask(server, "z" * 200, retention_s=60, prefix_priority=1)  # 50 of the 63 blocks for pins
    await ask(server, long, retention_s=60, prefix_priority=2)
    await flood(server)
    assert await ask(server, long) == 200
    assert await ask(server, "z" * 200) == 0
    await ask(server, "w" * 200, retention_s=600, prefix_priority=1)
    await flood(server)
    assert await ask(server, "w" * 200) == 0
    assert await ask(server, long) == 200


async def test_pins_of_an_operator(server):
    made = (await server.client.post(PINS, json={"prompt": PROMPT})).json()
    assert made["num_tokens"] == NUM_CACHED and made["num_blocks"] == NUM_CACHED // 4
    assert made["is_firm"] and made["expires_in_s"] is None
    again = (await server.client.post(PINS, json={"prompt": PROMPT, "prefix_priority": 7})).json()
    assert again["id"] == made["id"] and again["prefix_priority"] == 7
    await ask(server, "q" * 200, retention_s=60, prefix_priority=99)
    await flood(server)
    assert await ask(server) == NUM_CACHED, "no prompt of a request takes its place"
    pins = (await server.client.get(PINS)).json()["pins"]
    assert [pin["id"] for pin in pins] == [made["id"]]
    metrics = (await server.client.get("/metrics")).text
    assert "num_blocks_pinned{" in metrics
    assert (await server.client.delete(f"{PINS}/{made['id']}")).json() == {"id": made["id"], "deleted": True}
    assert (await server.client.delete(f"{PINS}/{made['id']}")).status_code == 404
    await flood(server)
    assert await ask(server) == 0


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({"system": [{"type": "text", "text": "s" * 60, "cache_control": MARK}]}, 56, 88),
        ({"messages": [{"role": "user", "content": [SAID | {"cache_control": MARK}, SAID]}]}, 76, 104),
        ({"cache_control": MARK}, 156, 200),
    ],
    ids=["system", "the user's first block", "all"],
)
async def test_what_stands_before_the_last_breakpoint_stays(server, fields, least, most):
    body = {"messages": [{"role": "user", "content": [SAID, SAID]}], "max_tokens": 1, **fields}
    answer = await server.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    pins = (await server.client.get(PINS)).json()["pins"]
    assert least <= sum(pin["num_tokens"] for pin in pins) <= most, pins


async def test_a_pin_over_the_budget_is_refused_and_nothing_waits(server):
    await server.client.post(PINS, json={"prompt": PROMPT})
    answer = await server.client.post(PINS, json={"prompt": "v" * 220})
    assert answer.status_code == 400
    assert (
        "Pinning 220 tokens needs 55 blocks of KV cache; pins may hold 63 (prefix_pin_share=0.5), and 15 are "
        "pinned. Release a pin, shorten the prefix, or raise prefix_pin_share." in answer.text
    )
    assert len((await server.client.get(PINS)).json()["pins"]) == 1


async def test_a_request_that_needs_all_blocks_gets_them():
    async with served(
        ServerConfig(dev_mode=True, enable_prompt_tokens_details=True), num_blocks=60, max_num_seqs=2
    ) as server:
        await server.client.post(PINS, json={"prompt": "p" * 100})
        assert await asyncio.wait_for(ask(server, "all " * 50), 10) == 0
        assert (await server.client.get(PINS)).json()["pins"] == []


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", {"prompt": "x", "retention_s": 0}, "retention_s"),
        ("/v1/completions", {"prompt": "x", "prefix_priority": 100}, "prefix_priority"),
        (PINS, {}, "either prompt or messages"),
        (PINS, {"prompt": "x", "messages": []}, "either prompt or messages"),
        (PINS, {"prompt": "x"}, "A prefix of 1 tokens fills no block of the cache."),
        (PINS, {"prompt": PROMPT, "retention_s": -1}, "retention_s must be greater than zero"),
        (
            PINS,
            {"prompt": PROMPT, "prefix_priority": -1},
            "prefix_priority must be a whole number from 0 to 99",
        ),
        ("/v1/messages", {"max_tokens": 1, "cache_control": {"type": "ephemeral", "ttl": "2h"}}, "ttl"),
        (
            "/v1/messages",
            {"max_tokens": 1, "system": [{"type": "text", "text": "", "cache_control": 3}]},
            "5m",
        ),
    ],
)
async def test_bad_input(server, path, body, text):
    if path == "/v1/messages":
        body = {"messages": [{"role": "user", "content": "hello"}], **body}
    answer = await server.client.post(path, json=body)
    assert answer.status_code == 400 and text in answer.text, answer.text


async def test_prefixes_from_a_file(server, tmp_path):
    path = tmp_path / "prefixes.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "retention_s": 60}) + "\n\n")
    assert await preload_prefixes(server.engine, str(path)) == 1
    await flood(server)
    assert await ask(server) == NUM_CACHED
    for line, text in [
        ("{", "line 1"),
        ('{"prompt": "x"}', "line 1: A prefix of 1 tokens"),
        ('{"text": "x"}', "unknown field"),
    ]:
        path.write_text(line)
        with pytest.raises(ConfigError, match=text):
            await preload_prefixes(server.engine, str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        await preload_prefixes(server.engine, str(tmp_path / "none"))
