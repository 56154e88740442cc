"""The fakes must fail where a runner would silently read another's memory."""

import pytest

from octavo.messages.kv import CachePlan
from octavo.messages.request import RequestSpec
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest, Place, SchedulerOutput, Tier
from tests.fakes import ByteTokenizer, FakeExecutor, RunnerFault, fake_config, fake_groups


def executor(*windows):
    fake = FakeExecutor(fake_groups(*windows))
    fake.start(fake_config())
    fake.allocate(CachePlan(fake.groups, 16, 4))
    return fake


def enter(request_id, tokens):
    return NewRequest(request_id, tokens, len(tokens), RequestSpec(SamplingParams(), seed=0))


def step(number, parts, new=(), released=(), copies=()):
    """parts: request id → (computed, scheduled, new blocks by group)"""
    computed, scheduled, blocks = (list(column) for column in zip(*parts.values(), strict=True))
    new_blocks = dict(enumerate(blocks))
    return SchedulerOutput(
        number, list(new), list(released), list(parts), computed, scheduled, new_blocks, list(copies)
    )


def run(fake, *args, **fields):
    return fake.execute(step(*args, **fields)).result()


def test_a_correct_run():
    fake = executor(0)
    first = run(fake, 0, {"a": (0, 6, [[1, 2]])}, new=[enter("a", [1] * 6)])
    assert len(first.sampled_token_ids[0]) == 1
    second = run(fake, 1, {"a": (6, 1, [[]]), "b": (4, 3, [[1, 3]])}, new=[enter("b", [1] * 7)])
    assert [len(tokens) for tokens in second.sampled_token_ids] == [1, 1]


@pytest.mark.parametrize(
    ("part", "fields", "fault"),
    [
        ({"b": (4, 3, [[1, 3]])}, {"new": [enter("b", [1, 1, 1, 2, 5, 6, 7])]}, "another's keys"),
        ({"b": (4, 3, [[5, 3]])}, {"new": [enter("b", [1] * 7)]}, "another's keys"),
        ({"b": (0, 3, [[0]])}, {"new": [enter("b", [1] * 3)]}, "null or out of range"),
        ({"b": (0, 3, [[16]])}, {"new": [enter("b", [1] * 3)]}, "null or out of range"),
        ({"b": (0, 4, [[3]])}, {"new": [enter("b", [1] * 3)]}, "do not exist"),
        ({"a": (5, 1, [[]])}, {}, "5 computed, not 6"),
        ({"a": (6, 1, [[]])}, {"new": [enter("a", [1])]}, "enters twice"),
        ({"a": (6, 1, [[]])}, {"released": ["b"]}, "has no slot"),
        ({"a": (6, 1, [[]])}, {"new": [enter("b", [1])]}, "no part"),
        ({"b": (5, 1, [[1, 3]])}, {"new": [enter("b", [1] * 6)]}, "another's keys"),
    ],
)
def test_faults_are_found(part, fields, fault):
    fake = executor(0)
    run(fake, 0, {"a": (0, 6, [[1, 2]])}, new=[enter("a", [1] * 6)])
    with pytest.raises(RunnerFault, match=fault):
        run(fake, 1, part, **fields)


def test_copies_and_windows():
    fake = executor(2)
    run(fake, 0, {"a": (0, 6, [[1, 2]])}, new=[enter("a", [1] * 6)])
    run(
        fake,
        1,
        {"b": (5, 1, [[0, 3]])},
        new=[enter("b", [1] * 6)],
        copies=[(Place(Tier.POOL, 2), Place(Tier.POOL, 3))],
    )
    with pytest.raises(RunnerFault, match="another's keys"):
        run(fake, 2, {"c": (4, 2, [[0, 4]])}, new=[enter("c", [1] * 6)])


def test_results_come_in_order_when_asked_for():
    fake = executor(0)
    futures = [
        fake.execute(step(0, {"a": (0, 3, [[1]])}, new=[enter("a", [1] * 3)])),
        fake.execute(step(1, {"a": (3, 1, [[]])})),
    ]
    assert not fake.steps
    assert futures[1].result().step_id == 1 and futures[0].done()


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    text = "Größe: 3 €"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*text.encode(), tokenizer.EOS]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (256, 257, 258)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "user: hi\nassistant:"
