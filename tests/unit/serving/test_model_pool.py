"""The pool of models over engines that do nothing: who waits, who gives way, who returns."""

import asyncio
from contextlib import asynccontextmanager, nullcontext, suppress
from types import SimpleNamespace

import pytest

from octavo.base.errors import BadCheckpoint, ConfigError, Overloaded, UnknownModel
from octavo.config.args import EngineArgs
from octavo.config.served_models import ModelEntry, ServedModels
from octavo.serving.errors import HTTPError
from octavo.serving.model_pool import engines as pooled
from octavo.serving.model_pool import model as pooled_model
from octavo.serving.model_pool import pool as pool_module
from octavo.serving.model_pool.footprint import Footprint
from octavo.serving.openai.models import card
from tests.fakes import fake_config

GIB = 1 << 30
SIZES = {"huge": 100, "big": 8}
pytestmark = pytest.mark.asyncio


class FakeEngine:
    """Notes what is asked of it; `faults` and `gates` are by model."""

    log: list
    faults: dict
    gates: dict
    held: dict
    most: int

    def __init__(self, config, **_):
        self.name, self.is_asleep = config.served_names[0], False
        self.dead = asyncio.Event()
        self.core = SimpleNamespace(wait_until_dead=self._wait)

    async def _wait(self):
        await self.dead.wait()
        return BadCheckpoint("it has died")

    def hold(self, gib):
        self.held[self.name] = gib
        FakeEngine.most = max(self.most, sum(self.held.values()))

    async def start(self):
        self.log.append(f"load {self.name}")
        self.hold(SIZES.get(self.name, 4))
        await asyncio.sleep(0)
        if gate := self.gates.get(self.name):
            await gate.wait()
        if fault := self.faults.get(self.name):
            raise fault

    async def sleep(self, level):
        self.log.append(f"sleep {self.name}")
        self.is_asleep = True
        await asyncio.sleep(0)
        self.hold(1)

    async def wake_up(self):
        self.log.append(f"wake {self.name}")
        self.hold(SIZES.get(self.name, 4))
        await asyncio.sleep(0)
        self.is_asleep = False

    async def shutdown(self, **_):
        self.log.append(f"end {self.name}")
        await asyncio.sleep(0)
        self.hold(0)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    FakeEngine.log, FakeEngine.faults, FakeEngine.gates = [], {}, {}
    FakeEngine.held, FakeEngine.most = {}, 0

    def resolve(args):
        config = fake_config()
        names = SimpleNamespace(**{**vars(config.observability), "served_model_name": args.served_model_name})
        vars(config)["observability"] = names
        if args.model == "absent":
            raise ConfigError("there is no such model")
        return config

    async def measure(config, host_bytes, gpu_bytes):
        return Footprint(SIZES.get(config.served_names[0], 4) * GIB, GIB)

    monkeypatch.setattr(pooled_model, "AsyncLLM", FakeEngine)
    monkeypatch.setattr(pooled_model, "resolve", resolve)
    monkeypatch.setattr(pooled_model, "bounded", lambda config: config)
    monkeypatch.setattr(pooled_model, "measure", measure)
    monkeypatch.setattr(pool_module, "_LOOK_S", 0.01)


def entry(name, model="m", **options):
    return ModelEntry(name=name, args=EngineArgs(model=model, served_model_name=[name]), **options)


@asynccontextmanager
async def running(*entries, memory=9, **options):
    """Engines of these models, or of a, b and c; two are awake together at most."""
    entries = entries or (entry("a", aliases=("x",)), entry("b"), entry("c"))
    served = ServedModels(entries=entries, memory_bytes=memory * GIB, **options)
    engines = pooled.PooledEngines(served)
    await engines.start()
    try:
        yield engines
    finally:
        await engines.shutdown(0.0)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def ask(engines, name, hold_s=0.0):
    with await engines.borrow(name):
        engine = engines.of(name)
        assert not engine.is_asleep and engine.name == engines.model(name).name
        await asyncio.sleep(hold_s)
        assert not engine.is_asleep


def state(engines, *names):
    return [engines.model(name).state for name in names]


async def test_a_model_is_loaded_by_its_first_request_only():
    async with running() as engines:
        assert state(engines, "a", "b") == ["unloaded", "unloaded"]
        await asyncio.gather(*(ask(engines, "a") for _ in range(5)), ask(engines, "x"))
        await ask(engines, "a")
        assert FakeEngine.log == ["load a"] and state(engines, "a", "x") == ["loaded", "loaded"]


async def test_the_least_recently_used_sleeps_and_wakes():
    async with running() as engines:
        for name in "abca":
            await ask(engines, name)
        assert FakeEngine.log == ["load a", "load b", "sleep a", "load c", "sleep b", "wake a"]


async def test_engines_beyond_the_most_go_once_the_new_one_is_there():
    async with running(max_loaded=2) as engines:
        for name in "abc":
            await ask(engines, name)
        await settled()
        assert FakeEngine.log == ["load a", "load b", "sleep a", "load c", "end a"]
        assert state(engines, "a", "b", "c") == ["unloaded", "loaded", "loaded"]


async def test_what_a_model_is_for_is_told_from_the_first_request_on():
    async with running(max_loaded=1) as engines:
        for name in "ab":
            await ask(engines, name)
        await settled()
        tasks = {listed.name: card(listed).tasks for listed in engines.listed() if listed.name in "ac"}
        assert tasks == {"a": ("generate",), "c": None}


async def test_a_busy_engine_beyond_the_most_goes_when_it_is_idle():
    async with running(max_loaded=1) as engines:
        first = asyncio.create_task(ask(engines, "a", 0.1))
        await asyncio.sleep(0.01)
        await ask(engines, "b")
        assert state(engines, "a", "b") == ["loaded", "loaded"]
        await first
        await asyncio.sleep(0.05)
        assert sorted(state(engines, "a", "b")) == ["loaded", "unloaded"]


async def test_a_leaving_model_finishes_its_requests_and_returns_for_new_ones():
    async with running(memory=6) as engines:
        first = asyncio.create_task(ask(engines, "a", 0.05))
        await asyncio.sleep(0.01)
        arriving = asyncio.create_task(ask(engines, "b", 0.01))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, arriving, *(ask(engines, name, 0.01) for name in "aba"))
        assert FakeEngine.log == ["load a", "sleep a", "load b", "sleep b", "wake a"]


async def settled():
    """Let tasks run that wait for nothing but each other."""
    for _ in range(30):
        await asyncio.sleep(0.001)


async def test_a_slow_load_delays_nobody_who_fits_beside_it():
    FakeEngine.gates["slow"] = asyncio.Event()
    async with running(entry("slow"), entry("a"), entry("b"), memory=10) as engines:
        slow = asyncio.create_task(ask(engines, "slow"))
        await settled()
        for name in "aba":
            await ask(engines, name)
        assert FakeEngine.log == ["load slow", "load a", "sleep a", "load b", "sleep b", "wake a"]
        assert not slow.done() and FakeEngine.most <= 10
        FakeEngine.gates["slow"].set()
        await slow


async def test_who_needs_the_memory_of_a_loading_model_waits_for_it():
    FakeEngine.gates["slow"] = asyncio.Event()
    async with running(entry("slow"), entry("a"), memory=6) as engines:
        both = [asyncio.create_task(ask(engines, name)) for name in ("slow", "a")]
        await settled()
        assert FakeEngine.log == ["load slow"]
        FakeEngine.gates["slow"].set()
        await asyncio.gather(*both)
        assert FakeEngine.log == ["load slow", "sleep slow", "load a"] and FakeEngine.most <= 6


async def test_a_later_arrival_leaves_an_earlier_one_its_place():
    """c would fit beside a model that loads; then big, which came first, would wait for both."""
    FakeEngine.gates["slow"] = asyncio.Event()
    async with running(entry("slow"), entry("big"), entry("c")) as engines:
        asked = []
        for name in ("slow", "big", "c"):
            asked.append(asyncio.create_task(ask(engines, name)))
            await settled()
        assert FakeEngine.log == ["load slow"]
        FakeEngine.gates["slow"].set()
        await asyncio.gather(*asked)
        loads = [line for line in FakeEngine.log if line.startswith("load")]
        assert loads == ["load slow", "load big", "load c"] and FakeEngine.most <= 9


async def test_groups_keep_a_model_from_one_that_is_loading():
    FakeEngine.gates["slow"] = asyncio.Event()
    groups = (frozenset(["slow", "a"]), frozenset(["b"]))
    async with running(entry("slow"), entry("a"), entry("b"), memory=99, groups=groups) as engines:
        slow, alone = (asyncio.create_task(ask(engines, name)) for name in ("slow", "b"))
        await settled()
        assert FakeEngine.log == ["load slow"]
        FakeEngine.gates["slow"].set()
        await asyncio.gather(slow, alone)
        assert FakeEngine.log == ["load slow", "sleep slow", "load b"]


async def test_a_client_that_leaves_while_another_model_drains_lets_that_stay():
    async with running(memory=6) as engines:
        first = asyncio.create_task(ask(engines, "a", 0.1))
        await asyncio.sleep(0.01)
        impatient = asyncio.create_task(ask(engines, "b"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(ask(engines, "a"))
        await asyncio.sleep(0.01)
        impatient.cancel()
        await late
        assert not first.done() and FakeEngine.log == ["load a"]
        await first


async def test_a_model_that_fails_to_load_drives_nobody_out():
    FakeEngine.faults["bad"] = BadCheckpoint("its weights are torn")
    entries = entry("a"), entry("b"), entry("bad")
    async with running(*entries, max_loaded=2) as engines:
        await ask(engines, "a")
        await ask(engines, "b")
        with pytest.raises(HTTPError, match=r"'bad' could not be loaded. its weights are torn") as refused:
            await ask(engines, "bad")
        assert refused.value.status == 503 and state(engines, "bad") == ["failed"]
        await ask(engines, "a")
        assert state(engines, "a", "b") == ["loaded", "loaded"]
        assert FakeEngine.log.count("load a") == FakeEngine.log.count("load b") == 1
        num_loads = FakeEngine.log.count("load bad")
        with pytest.raises(HTTPError, match="torn"):  # at once, without another try
            await ask(engines, "bad")
        assert FakeEngine.log.count("load bad") == num_loads == 1
        FakeEngine.faults.clear()
        await engines.pool.load(engines.model("bad"))
        await ask(engines, "bad")


async def test_a_model_that_takes_long_to_fail_drives_nobody_out():
    """Those who look after engines that are too many come by meanwhile."""
    FakeEngine.faults["bad"], FakeEngine.gates["bad"] = BadCheckpoint("torn"), asyncio.Event()
    async with running(entry("a"), entry("b"), entry("bad"), max_loaded=2) as engines:
        await ask(engines, "a")
        await ask(engines, "b")
        failing = asyncio.create_task(ask(engines, "bad"))
        await asyncio.sleep(0.1)
        assert state(engines, "bad") == ["loading"]
        FakeEngine.gates["bad"].set()
        with pytest.raises(HTTPError, match="torn"):
            await failing
        await ask(engines, "a")
        assert not [line for line in FakeEngine.log if line in ("end a", "end b")]


async def test_one_that_was_unloaded_for_a_failure_returns():
    FakeEngine.faults["bad"] = BadCheckpoint("torn")
    async with running(entry("a"), entry("bad"), memory=4) as engines:
        await ask(engines, "a")
        with pytest.raises(HTTPError, match="torn"):
            await ask(engines, "bad")
        await asyncio.sleep(0.05)
        assert FakeEngine.log == ["load a", "end a", "load bad", "end bad", "load a"]
        assert state(engines, "a") == ["loaded"]


@pytest.mark.parametrize(("name", "model", "text"), [("huge", "m", "too big"), ("lost", "absent", "no such")])
async def test_what_cannot_fit_is_refused_before_anybody_moves(name, model, text):
    async with running(entry("a"), entry(name, model), memory=9) as engines:
        await ask(engines, "a")
        with pytest.raises(HTTPError, match=text):
            await ask(engines, name)
        assert FakeEngine.log == ["load a"]


async def test_idle_models_sleep_then_go():
    async with running(entry("a", sleep_after_s=0.03, ttl_s=0.1), entry("b")) as engines:
        await asyncio.gather(ask(engines, "a"), ask(engines, "b"))
        await asyncio.sleep(0.06)
        assert state(engines, "a", "b") == ["sleeping", "loaded"]
        await asyncio.sleep(0.1)
        assert state(engines, "a", "b") == ["unloaded", "loaded"]


async def test_a_request_says_how_long_its_model_stays():
    async with running(entry("a", ttl_s=0.05)) as engines:
        with await engines.borrow("a"):
            engines.keep("a", float("inf"))
        await asyncio.sleep(0.1)
        assert state(engines, "a") == ["loaded"]
        engines.keep("a", 0.0)
        await asyncio.sleep(0.05)
        assert state(engines, "a") == ["unloaded"]


async def test_waiting_is_bounded_in_number_and_time():
    FakeEngine.gates["a"] = asyncio.Event()
    async with running(max_waiting=2, load_timeout_s=0.05) as engines:
        waiting = [asyncio.create_task(ask(engines, "a")) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="2 requests wait for the model 'a'"):
            await ask(engines, "a")
        for task in waiting:
            with pytest.raises(Overloaded, match=r"'a' was not there within 0.05 s"):
                await task
        FakeEngine.gates["a"].set()
        await ask(engines, "a")


async def test_preloaded_models_are_there_at_the_start():
    FakeEngine.faults["bad"] = BadCheckpoint("torn")
    async with running(entry("a", preload=True), entry("bad", preload=True), entry("c")) as engines:
        assert state(engines, "a", "bad", "c") == ["loaded", "failed", "unloaded"]


async def test_an_engine_that_is_gone_for_good_is_replaced_on_demand():
    async with running() as engines:
        await ask(engines, "a")
        engines.of("a").dead.set()
        await asyncio.sleep(0.02)
        assert state(engines, "a") == ["failed"]
        await engines.pool.load(engines.model("a"))
        await ask(engines, "a")


async def test_unload_waits_for_requests():
    async with running() as engines:
        task = asyncio.create_task(ask(engines, "a", 0.05))
        await asyncio.sleep(0.01)
        await engines.pool.unload(engines.model("a"))
        assert task.done() and state(engines, "a") == ["unloaded"]
        await engines.pool.unload(engines.model("a"))  # nothing to do


async def test_unloading_goes_on_when_who_asked_for_it_has_left():
    async with running() as engines:
        first = asyncio.create_task(ask(engines, "a", 0.03))
        await settled()
        asked = asyncio.create_task(engines.pool.unload(engines.model("a")))
        await asyncio.sleep(0)
        asked.cancel()
        await first
        await settled()
        assert state(engines, "a") == ["unloaded"]
        await ask(engines, "a")


async def test_a_model_that_waits_for_a_dead_one_comes():
    async with running(memory=4) as engines:
        with await engines.borrow("a"):
            waiting = asyncio.create_task(ask(engines, "b"))
            await settled()
            assert not waiting.done()
            engines.of("a").dead.set()
            await settled()
        await asyncio.wait_for(waiting, 1.0)


async def test_the_end_of_the_server_is_told_to_who_waits():
    FakeEngine.gates["a"] = asyncio.Event()
    async with running() as engines:
        waiting = asyncio.create_task(ask(engines, "a"))
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="shutting down"):
        await waiting


async def test_changes_are_told():
    async with running() as engines:
        changes = engines.pool.feed.follow()
        first = asyncio.create_task(anext(changes))
        await asyncio.sleep(0)
        await ask(engines, "a")
        assert [await first, await anext(changes)] == [("a", "loading"), ("a", "loaded")]
        await changes.aclose()


async def test_metrics_are_by_model():
    async with running() as engines:
        for name in "abc":
            await ask(engines, name)
        series = {(m.name, *sorted(m.labels.items())): m for m in engines.metrics.snapshot()}
        asleep = ("vllm:model_state", ("engine", "0"), ("model_name", "a"), ("state", "sleeping"))
        loads = ("vllm:model_loads", ("engine", "0"), ("kind", "load"), ("model_name", "c"))
        assert series[asleep].value == series[loads].value == 1


async def test_names():
    async with running() as engines:
        assert engines.names == ["a", "x", "b", "c"] and engines.resolve(None) == "a"
        assert engines.resolve("b:latest") == "b"
        with pytest.raises(UnknownModel, match="Served here: a, x, b, c"):
            await engines.borrow("../../etc/passwd")
        with pytest.raises(Overloaded, match="'b' is not loaded"):
            engines.of("b")


async def test_random_requests_never_meet_a_model_that_is_not_there():
    """Without the lease a model would sleep under its requests: `ask` looks."""
    FakeEngine.faults["bad"] = BadCheckpoint("torn")
    entries = entry("a"), entry("b"), entry("c"), entry("bad"), entry("huge")
    async with running(*entries, memory=6, max_loaded=2) as engines:
        names = [list("abc")[i * i % 3] if i % 7 else ("bad", "huge")[i % 2] for i in range(300)]

        async def one(number, name):
            await asyncio.sleep(number % 20 / 1000)
            with suppress(HTTPError) if name in ("bad", "huge") else nullcontext():
                task = asyncio.create_task(ask(engines, name, number % 5 / 1000))
                if number % 11 == 0:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    await task

        await asyncio.gather(*(one(*pair) for pair in enumerate(names)))
        models = [engines.model(name) for name in "abc"]
        await settled()
        assert all(model.num_users == 0 and not model.waiters and not model.departure for model in models)
        assert "wake" in " ".join(FakeEngine.log) and FakeEngine.most <= 6
