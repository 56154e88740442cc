"""The core in its own process: requests, control, faults at the start, deaths; nothing is ever left."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from octavo.base.errors import ConfigError, EngineDead, OctavoError, RequestError
from octavo.frontend.client.zmq import AsyncClient
from octavo.messages.control import core_pipe
from octavo.messages.request import FinishReason
from tests.fakes import expected_output, fake_request
from tests.process_fakes import is_alive, process_config, wait_until


@pytest.fixture(autouse=True)
def tmpdir_of_its_own(tmp_path, monkeypatch):
    """Nothing may be left there, whatever happened."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
async def start():
    clients = []

    async def start(**orders):
        client = AsyncClient(process_config(**orders))
        clients.append(client)
        return client, await asyncio.wait_for(client.start(), 20)

    yield start
    for client in clients:
        await client.close()
        await client.close()


async def collect(client, num_requests):
    """Tokens and finish reasons by request, until `num_requests` have ended."""
    tokens, reasons = {}, {}
    async for step in client.outputs():
        for output in step.outputs:
            assert output.request_id not in reasons, "an output after the end"
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        if len(reasons) == num_requests:
            break
    return tokens, reasons


def requests(num, max_tokens=8, prefix="r"):
    return [fake_request(f"{prefix}{i}", [i + 1, 2, 3], max_tokens, seed=i) for i in range(num)]


async def test_requests_run_as_without_a_process(start):
    client, ready = await start()
    assert ready.plan.num_blocks == 64
    assert ready.max_model_len == 64
    batch = requests(20)
    for request in batch:
        client.add(request)
    tokens, reasons = await asyncio.wait_for(collect(client, 20), 20)
    for request in batch:
        expected, reason, _ = expected_output(request, 64)
        assert tokens[request.request_id] == expected
        assert reasons[request.request_id] is reason


async def test_what_the_core_refuses_ends_with_an_error(start):
    client, _ = await start()
    client.add(fake_request("long", list(range(200))))
    client.add(fake_request("fine", [1]))
    tokens, reasons = await asyncio.wait_for(collect(client, 2), 10)
    assert reasons == {"long": FinishReason.ERROR, "fine": FinishReason.LENGTH}
    assert len(tokens["fine"]) == 8


async def test_duplicates_and_garbage_on_the_wire_disturb_nothing(start, tmp_path):
    client, _ = await start(step_s=0.01)
    request = requests(1, max_tokens=20)[0]
    address = f"ipc://{next(tmp_path.iterdir()) / core_pipe(1)}"
    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.connect(address)
        client.add(request)
        for frame in (b"", b"\xc1", b"add", msgspec.msgpack.encode(["add", 1]), os.urandom(500)):
            intruder.send(frame)
        intruder.send(msgspec.msgpack.encode(request))
        tokens, _ = await asyncio.wait_for(collect(client, 1), 10)
    assert tokens[request.request_id] == expected_output(request, 64)[0]
    assert await client.call("collective_rpc", {"verb": "ping"})


async def test_abort(start):
    client, _ = await start(step_s=0.01)
    for request in requests(3, max_tokens=50):
        client.add(request)
    client.abort(["r0", "r2", "unknown"])
    client.abort(["r0"])
    _, reasons = await asyncio.wait_for(collect(client, 1), 10)
    assert reasons == {"r1": FinishReason.LENGTH}
    assert (await client.call("stats"))["num_blocks_used"] == 0


async def test_call(start):
    client, _ = await start()
    arguments = {"list": [1, 2.5, None, "é"], "bytes": b"\0"}
    verb, returned, pid = await client.call("collective_rpc", {"verb": "echo", "arguments": arguments})
    assert (verb, returned, pid) == ("echo", arguments, client._core.pid)
    for wrong, text in (("nonsense", "Unknown command 'nonsense'"), ("collective_rpc", "needs 'verb'")):
        with pytest.raises(RequestError, match=text):
            await client.call(wrong)
    with pytest.raises(OctavoError, match="object") as caught:
        await client.call("collective_rpc", {"verb": "unsendable"})
    assert not isinstance(caught.value, ValueError), "the caller cannot mend it"
    results = await asyncio.gather(*(client.call("reset_prefix_cache") for _ in range(10)))
    assert results == [True] * 10


async def test_close_ends_open_requests_and_their_stream(start):
    client, _ = await start(step_s=0.01)
    for request in requests(3, max_tokens=50):
        client.add(request)
    collecting = asyncio.create_task(collect(client, 99))
    await asyncio.sleep(0.1)
    pid = client._core.pid
    await client.close()
    _, reasons = await asyncio.wait_for(collecting, 1)
    assert reasons == dict.fromkeys(["r0", "r1", "r2"], FinishReason.ABORT)
    assert not is_alive(pid)
    with pytest.raises(EngineDead):
        client.add(requests(1)[0])
    with pytest.raises(EngineDead):
        await client.call("stats")


async def test_a_core_that_hangs_is_killed_by_close(start):
    client, _ = await start()
    pid = client._core.pid
    os.kill(pid, signal.SIGSTOP)
    await client.close(timeout_s=0.2)
    assert not is_alive(pid)


async def test_close_before_start():
    await AsyncClient(process_config()).close()


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("load:config", ConfigError, "^the option is wrong$"),
        ("load:raise", EngineDead, "RuntimeError: the fake was told to fail"),
        ("load:exit", EngineDead, "exit code 3"),
    ],
)
async def test_start_fails(start, capfd, fault, error, text):
    with pytest.raises(error, match=text):
        await start(fault=fault)
    assert ("Traceback" in capfd.readouterr().err) == (fault == "load:raise")


async def test_unknown_executor(start):
    with pytest.raises(ConfigError, match="Unknown executor 'nonsense'"):
        await start(executor="nonsense")


async def test_cancelled_start_leaves_nothing():
    client = AsyncClient(process_config(fault="load:hang"))
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(1)
    pid = client._core.pid
    began = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - began < 2
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("kill", "text"), [(True, "exit code -9"), (False, "A step failed: RuntimeError: the fake was told")]
)
async def test_death_is_told_to_all_within_a_second(start, kill, text):
    client, _ = await start(step_s=0.02, fault="" if kill else "5:raise")
    calls = [asyncio.create_task(client.call("stats")) for _ in range(3)]
    await asyncio.gather(*calls)
    for request in requests(3, max_tokens=50):
        client.add(request)
    if kill:
        await asyncio.sleep(0.1)
        os.kill(client._core.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=text):
        await asyncio.wait_for(collect(client, 3), 1)
    for attempt in (lambda: client.add(requests(1)[0]), lambda: client.abort(["r0"])):
        with pytest.raises(EngineDead, match=text):
            attempt()
    with pytest.raises(EngineDead, match=text):
        await client.call("stats")


async def test_a_call_that_waits_ends_with_the_core(start):
    client, _ = await start(step_s=0.5)
    client.add(requests(1)[0])
    await asyncio.sleep(0.1)  # now it is in a step
    calling = asyncio.create_task(client.call("stats"))
    await asyncio.sleep(0.05)
    os.kill(client._core.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(calling, 1)


async def test_sigterm_is_a_shutdown_and_sigint_is_nothing(start):
    client, _ = await start(step_s=0.01)
    client.add(requests(1, max_tokens=50)[0])
    os.kill(client._core.pid, signal.SIGINT)
    await asyncio.sleep(0.05)
    os.kill(client._core.pid, signal.SIGTERM)
    reasons = {}
    with pytest.raises(EngineDead, match="shut down"):
        async for step in client.outputs():
            reasons |= {o.request_id: o.finish_reason for o in step.outputs if o.finish_reason}
    assert reasons == {"r0": FinishReason.ABORT}


async def test_an_idle_core_uses_no_cpu_and_wakes_at_once(start):
    client, _ = await start()

    def cpu_ticks():
        fields = Path(f"/proc/{client._core.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, fields[11:13]))

    await asyncio.sleep(0.2)
    before = cpu_ticks()
    await asyncio.sleep(1)
    assert cpu_ticks() - before <= 2, "hundredths of a second"
    client.add(requests(1, max_tokens=1)[0])
    await asyncio.wait_for(collect(client, 1), 0.2)


FRONT = """
    import asyncio, sys
    from octavo.frontend.client.zmq import AsyncClient
    from tests.process_fakes import process_config

    async def main():
        client = AsyncClient(process_config({arguments}))
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.5)
        if {wait}:
            await starting
        print(client._core.pid, flush=True)
        {then}

    asyncio.run(main())
"""


@pytest.fixture
def start_front(tmp_path):
    """A front in a process of its own; returns it and the pid of its core."""
    fronts = []

    def start_front(arguments="", wait=True, then="await asyncio.sleep(60)"):
        script = textwrap.dedent(FRONT.format(arguments=arguments, wait=wait, then=then))
        environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        front = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        fronts.append(front)
        return front, int(front.stdout.readline())

    yield start_front
    for front in fronts:
        front.kill()
        front.communicate()


RANKS = "'tests.process_fakes:FakeRanks', tp=2"
WAIT = "await asyncio.sleep(60)"
WORK = """
        from tests.fakes import fake_request
        for number in range(8):
            client.add(fake_request(f"r{number}", [1, 2], 60))
        await asyncio.sleep(60)
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "then", "stopped"),
    [
        pytest.param("", WAIT, False, id="idle"),
        pytest.param("step_s=0.05", WORK, False, id="under load"),
        pytest.param("fault='load:hang'", WAIT, False, id="loading"),
        pytest.param("", WAIT, True, id="stopped"),
        pytest.param(f"{RANKS}, fault='3:hang', fault_rank=1", WORK, False, id="ranks, one hangs"),
        pytest.param(f"{RANKS}, fault='load:hang'", WAIT, False, id="ranks, loading"),
        pytest.param(RANKS, WAIT, True, id="ranks, one stopped"),
    ],
)
def test_a_killed_front_takes_everything_with_it(start_front, tmp_path, arguments, then, stopped):
    wait = "load" not in arguments
    front, pid = start_front(arguments, wait, then)
    core = psutil.Process(pid)
    num_ranks = 2 if "tp=2" in arguments else 0
    pipes = ["*/core-1", *(f"*/rank{rank}" for rank in range(num_ranks))]
    assert wait_until(lambda: all(list(tmp_path.glob(pipe)) for pipe in pipes), 10)
    pids = [pid, *(rank.pid for rank in core.children())]
    if stopped:  # so that it cannot notice by itself
        os.kill(pids[-1], signal.SIGSTOP)
    front.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)), 5)
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 2)


@pytest.mark.parametrize("then", ["return", "raise SystemExit(3)", "del client"])
def test_a_front_that_forgets_to_close_leaves_nothing(start_front, tmp_path, then):
    front, pid = start_front(then=then)
    _, errors = front.communicate(timeout=10)
    assert not is_alive(pid)
    assert list(tmp_path.iterdir()) == []
    assert b"Traceback" not in errors
