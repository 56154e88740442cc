"""The verbs are written once: every API has them with the same arguments and texts."""

import asyncio
import dataclasses
import inspect

import pytest

from octavo import LLM, AsyncLLM, LLMEngine
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.operated import in_thread
from octavo.frontend.operator import Operator
from octavo.frontend.requests.adapters import AdapterFiles
from tests.fakes import fake_config

_COROUTINES = inspect.getmembers(Operator, inspect.iscoroutinefunction)
VERBS = [name for name, _ in _COROUTINES if not name.startswith("_")]
OF_ONE_LOOP = {"is_tracing_enabled", "scale_elastic_ep"}


def test_every_engine_has_every_verb():
    assert len(VERBS) >= 20
    missing = [verb for verb in VERBS if not hasattr(AsyncLLM, verb)]
    assert missing == ["apply_model"], "workers of another process take no functions"
    assert {verb for verb in VERBS if not hasattr(LLMEngine, verb)} == OF_ONE_LOOP


@pytest.mark.parametrize("kind", [LLM, LLMEngine, AsyncLLM])
def test_arguments_and_texts_are_the_verbs_own(kind):
    verbs = [verb for verb in VERBS if hasattr(kind, verb)]
    assert len(verbs) >= 11
    for verb in verbs:
        method, written = getattr(kind, verb), getattr(Operator, verb)
        assert inspect.signature(method) == inspect.signature(written)
        assert method.__doc__ == written.__doc__
        assert inspect.iscoroutinefunction(method) is (kind is AsyncLLM)


class Core:
    """Notes what is asked of it; `frozen` is what pausing brings."""

    def __init__(self, frozen):
        self.asked = []
        self._frozen = frozen

    async def call(self, verb, arguments=None, timeout_s=None):
        self.asked.append(verb)
        return self._frozen or bool((arguments or {}).get("freeze"))

    def open_keys(self):
        return ["a"]

    def end_all(self, keys):
        self.asked.append(("end", keys))

    async def finish_all(self, keys):
        self.asked.append(("finish", keys))


class Engine:
    """What has an operator."""

    pause = in_thread(Operator.pause_generation)

    def __init__(self, core, config=None):
        self.operator = Operator(config or fake_config(), EngineMetrics(), core, AdapterFiles(fake_config()))


@pytest.mark.parametrize(
    ("mode", "frozen", "asked"),
    [
        ("abort", False, ["pause", ("end", ["a"])]),
        ("wait", False, ["pause", ("finish", ["a"]), "pause"]),
        ("wait", True, ["pause"]),
        ("keep", False, ["pause"]),
    ],
)
def test_who_stands_still_is_not_waited_for(mode, frozen, asked):
    core = Core(frozen)
    engine = Engine(core)
    engine.pause(mode, clear_cache=False)
    assert core.asked == asked
    assert engine.operator.is_frozen


@pytest.mark.parametrize("endpoint", ["", "http://localhost:4317"])
def test_tracing_is_on_where_spans_are_sent(endpoint):
    config = fake_config()
    observability = dataclasses.replace(config.observability, otlp_traces_endpoint=endpoint)
    config = dataclasses.replace(config, observability=observability)
    asked = in_thread(Operator.is_tracing_enabled)
    engine = Engine(Core(frozen=False), config)
    assert asked(engine) is bool(endpoint)


def test_a_verb_that_waits_has_no_place_in_a_thread():
    class Waiting(Core):
        async def finish_all(self, keys):
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waited for an event loop"):
        Engine(Waiting(frozen=False)).pause("wait")
