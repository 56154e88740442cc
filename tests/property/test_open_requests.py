"""The front's half of the promises about ends (RELIABILITY.md, I-12, I-13, I-20), as a state machine.

The core is played by hand: it answers for requests that it does not yet know to be ended, and brings outputs
after aborts, as one with steps in flight does.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats
from octavo.messages.sampling import RequestOutputKind, SamplingParams
from tests.fakes import ByteTokenizer, fake_config

TOKENIZER = ByteTokenizer()
INPUTS = InputProcessor(fake_config(max_model_len=1000), TOKENIZER)
ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.TIMEOUT])
TEXTS = st.sampled_from(["a", "xy", "x", "y", "\xe9"])


class OpenRequests(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.processor = OutputProcessor(TOKENIZER)
        self.children = {}
        """Engine ids of every request ever, by key."""
        self.names = {}
        self.received = {}
        self.forgotten = set()
        self.in_core = {}
        """Engine ids that the core computes, and their owner's key."""
        self.aborted = []
        """Engine ids whose abort is on its way to the core."""

    @rule(
        num=st.integers(1, 3),
        name=st.sampled_from(["a", "b", "c"]),
        kind=st.sampled_from(RequestOutputKind),
        stop=st.booleans(),
    )
    def open(self, num, name, kind, stop):
        params = SamplingParams(n=num, output_kind=kind, stop=["xy"] if stop else None, max_tokens=500)
        prepared = INPUTS.process("prompt", params, request_id=name)
        outputs = self.received[prepared.key] = []
        self.processor.add(prepared, outputs.append)
        self.children[prepared.key] = [request.request_id for request in prepared.engine_requests]
        self.names[prepared.key] = name
        self.in_core |= dict.fromkeys(self.children[prepared.key], prepared.key)

    @precondition(lambda self: self.in_core)
    @rule(data=st.data())
    def step(self, data):
        ids = data.draw(st.lists(st.sampled_from(list(self.in_core)), min_size=1, unique=True))
        outputs = []
        for engine_id in ids:
            end = data.draw(st.none() | ENDS)
            outputs.append(EngineOutput(engine_id, list(data.draw(TEXTS).encode()), finish_reason=end))
            if end is not None:
                del self.in_core[engine_id]
        self.expect_aborts(self.processor.process(EngineOutputs(outputs, SchedulerStats())).abort_ids)

    @precondition(lambda self: self.aborted)
    @rule()
    def aborts_arrive(self):
        for engine_id in self.aborted:
            self.in_core.pop(engine_id, None)
        self.aborted = []

    @rule(name=st.sampled_from(["a", "b", "c", "unknown"]))
    def abort(self, name):
        keys = self.processor.keys_of([name])
        still_open = [key for key in self.open_keys() if self.names[key] == name]
        assert keys == still_open
        self.expect_aborts(self.processor.end(keys, FinishReason.ABORT).abort_ids)
        assert not set(keys) & set(self.processor.open_keys()), "one abort ends all children"

    @precondition(lambda self: self.children)
    @rule(data=st.data())
    def reader_leaves(self, data):
        key = data.draw(st.sampled_from(list(self.children)))
        self.forgotten.add(key)
        before = len(self.received[key])
        self.expect_aborts(self.processor.forget([key]))
        assert len(self.received[key]) == before
        assert self.processor.forget([key]) == []

    def open_keys(self):
        return [key for key in self.children if not self.is_over(key)]

    def is_over(self, key):
        return key in self.forgotten or any(output.finished for output in self.received[key])

    def expect_aborts(self, engine_ids):
        assert len(engine_ids) == len(set(engine_ids))
        assert not set(engine_ids) & set(self.aborted), "aborted twice"
        assert set(engine_ids) <= self.in_core.keys(), "an abort of what has ended by itself"
        self.aborted += engine_ids

    @invariant()
    def each_ends_once_and_nothing_follows(self):
        for outputs in self.received.values():
            ends = [number for number, output in enumerate(outputs) if output.finished]
            assert ends in ([], [len(outputs) - 1])
        assert self.processor.open_keys() == self.open_keys()

    @invariant()
    def an_end_is_the_end_of_all_children(self):
        for key, outputs in self.received.items():
            if outputs and outputs[-1].finished:
                running = [i for i in self.children[key] if self.in_core.get(i) and i not in self.aborted]
                assert not running, "the core goes on for nobody"

    def teardown(self):
        self.expect_aborts(self.processor.forget(self.processor.open_keys()))
        assert set(self.in_core) <= set(self.aborted)
        assert self.processor.num_open == 0
        assert not self.processor._owners
        assert not self.processor._keys


TestOpenRequests = OpenRequests.TestCase
TestOpenRequests.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
