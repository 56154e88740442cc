"""Grammars over single bytes, an engine that samples any token that is allowed, and random schemas."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from octavo.engine.core import EngineCore
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.messages.request import EngineOutput, EngineRequest
from octavo.messages.structured import Constraint, StructuredOutputsParams, Vocabulary
from tests.fakes import FakeExecutor, fake_config, fake_request

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "status": {"enum": ["open", "paid", "shipped", "returned", "lost"]},
        "gift": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 24},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["id", "status", "gift", "note", "tags"],
    "additionalProperties": False,
}
EOS = 257
VOCAB_SIZE = 258
BYTES = Vocabulary(
    tokens=[*(bytes([i]) for i in range(256)), b"<s>", b"</s>"], special_ids=[256, EOS], end_ids=[EOS]
)


class ByteEngine:
    """An engine over a FakeExecutor whose vocabulary is all bytes and an end of text."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.vocabulary = folder / "bytes"
        self.vocabulary.write_bytes(msgspec.msgpack.encode(BYTES))
        config = fake_config(**({"num_blocks": 4000, "max_model_len": 4000} | options))
        checkpoint = dataclasses.replace(config.checkpoint, config={"vocab_size": VOCAB_SIZE})
        self.executor = FakeExecutor(vocab_size=VOCAB_SIZE)
        self.core = EngineCore(dataclasses.replace(config, checkpoint=checkpoint), self.executor)
        self.core.start()

    def constraint(self, **params: object) -> Constraint:
        return Constraint(
            GuidanceBackend.translate(StructuredOutputsParams(**params)), str(self.vocabulary), "guidance"
        )

    def request(
        self, name: str, max_tokens: int = 400, seed: int = 0, prompt=(1, 2, 3), **params
    ) -> EngineRequest:
        fields = {key: params.pop(key) for key in ("sampling", "eos", "leader_id") if key in params}
        return fake_request(
            name,
            list(prompt),
            max_tokens,
            seed=seed,
            constraint=self.constraint(**params) if params else None,
            **({"eos": [EOS]} | fields),
        )

    def run(self, requests: Iterable[EngineRequest]) -> dict[str, tuple[list[int], EngineOutput]]:
        """By id: all tokens, and the last output."""
        for request in requests:
            self.core.add(request)
        return self.drain()

    def drain(self) -> dict[str, tuple[list[int], EngineOutput]]:
        tokens: dict[str, list[int]] = {}
        ends = {}
        for output in self.outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = tokens[output.request_id], output
        return ends

    def outputs(self) -> Iterator[EngineOutput]:
        while self.core.has_work():
            yield from self.core.step().outputs


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


# Schemas that nest, within what back ends support.

_NAMES = st.sampled_from(["a", "b", "name", "Ä", "x y", 'q"', "\\", "1"])
_SCALARS = st.sampled_from([None, True, False, 0, -1, 7, 2.5, -1e3, "", "ab", "é\n", 'say "hi"'])


def _limits(low: str, high: str, least: int = 0, most: int = 6) -> st.SearchStrategy[dict]:
    pairs = st.tuples(st.integers(least, most), st.integers(0, 4))
    return st.one_of(st.just({}), pairs.map(lambda p: {low: p[0], high: p[0] + p[1]}))


def _strings() -> st.SearchStrategy[dict]:
    shaped = st.sampled_from([
        {"pattern": "^[a-c]{2,4}$"},
        {"pattern": "^(x|yy)*$"},
        {"format": "date"},
        {"format": "uuid"},
        {"format": "ipv4"},
    ])  # fmt: skip
    return st.one_of(_limits("minLength", "maxLength"), shaped).map(lambda extra: {"type": "string"} | extra)


def _numbers() -> st.SearchStrategy[dict]:
    kinds = st.sampled_from([{"type": "integer"}, {"type": "number"}])
    return st.tuples(kinds, _limits("minimum", "maximum", -50, 50)).map(lambda pair: pair[0] | pair[1])


def _objects(schemas: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    def build(properties: dict, required: float, more: object) -> dict:
        names = list(properties)
        extra = {} if more is None else {"additionalProperties": more}
        kept = names[: round(required * len(names))]
        return {"type": "object", "properties": properties, "required": kept} | extra

    more = st.one_of(st.just(False), st.just(False), st.none(), schemas)
    return st.builds(build, st.dictionaries(_NAMES, schemas, max_size=4), st.floats(0, 1), more)


def _compounds(schemas: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    arrays = st.tuples(schemas, _limits("minItems", "maxItems", 0, 2)).map(
        lambda pair: {"type": "array", "items": pair[0]} | pair[1]
    )
    tuples = st.lists(schemas, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    either = st.lists(schemas, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(_objects(schemas), arrays, tuples, either)


SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        _SCALARS.map(lambda value: {"const": value}),
        st.lists(_SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        _strings(),
        _numbers(),
    ),
    _compounds,
    max_leaves=8,
)
