"""A shortlist says the same as the library asked about every token, at every place of random texts.

On the vocabulary of the default model, whose tokens run across the ends of strings. The reference is the
library itself over all tokens.
"""

import json
import time
from threading import current_thread, main_thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from octavo.base.errors import RequestError
from octavo.engine.structured import shortlist
from octavo.engine.structured.alphabet import Alphabet
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.engine.structured.schema_texts import SchemaTexts
from octavo.engine.structured.shortlist import Place, Shortlist, Steps, make_tokenizer
from octavo.messages.structured import StructuredOutputsParams, Vocabulary
from tests.real_tokenizers import real_tokenizer
from tests.structured import ORDER, SCHEMAS

BOUNDED = {"type": "string", "maxLength": 3}
ORDERS = {"type": "array", "minItems": 2, "items": ORDER}
LITERALS = ["returned to sender", 'the "quoted" word', "naïve café", 7]
CASES = {
    "order": ORDERS,
    "literals beside strings": {
        "minItems": 4,
        "items": {"anyOf": [BOUNDED, {"enum": LITERALS}]},
        "type": "array",
    },
    "narrow strings": {
        "type": "array",
        "minItems": 4,
        "items": {
            "anyOf": [
                BOUNDED,
                {"type": "string", "format": "date-time"},
                {"type": "string", "format": "uuid"},
                {"type": "string", "pattern": "^(?:back|full)-[a-f]{2,9}\\.$"},
            ]
        },
    },
    "names": {
        "type": "object",
        "properties": {"pattern": BOUNDED, "format": {"type": "number"}, "description": {"const": "about"}},
        "required": ["pattern", "format"],
        "patternProperties": {"^x_[0-9]+$": BOUNDED},
        "additionalProperties": {"type": "string", "minLength": 3, "maxLength": 40},
    },
    "recursion": {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "text": BOUNDED}}
        },
        "$ref": "#/$defs/node",
    },
    "anything": {"type": "object"},
}


@pytest.fixture(scope="module")
def vocabulary(smollm2_path):
    tokenizer = real_tokenizer(smollm2_path)
    tokens = [tokenizer.token_bytes(i) for i in range(49152)]
    return Vocabulary(tokens, special_ids=sorted(tokenizer.special_ids), end_ids=[2])


@pytest.fixture(scope="module")
def all_tokens(vocabulary):
    return make_tokenizer(vocabulary)


@pytest.fixture(scope="module")
def backend(vocabulary):
    return GuidanceBackend(vocabulary)


@pytest.fixture(scope="module")
def weights(vocabulary):
    """[favourites, tokens]."""
    is_blank = np.array([token.isspace() for token in vocabulary.tokens])
    has = [np.array([byte in token for token in vocabulary.tokens]) for byte in (b'"', b"\\", b"e")]
    return np.where(is_blank, 0.01, np.where(has, 30.0, 1.0))


def params_of(schema):
    return schema if isinstance(schema, StructuredOutputsParams) else StructuredOutputsParams(json=schema)


class Walk:
    """One random text of a schema or another form, and how many of its masks differ from the library's."""

    def __init__(self, backend, all_tokens, vocabulary, weights, schema, seed=0, num_steps=40, compiled=None):
        """compiled: the grammar, which other walks have gone through."""
        grammar = backend.translate(params_of(schema))
        matcher = (compiled or backend.compile(grammar)).copy()
        reference = LLMatcher(all_tokens, grammar, log_level=0)
        self.uses_shortlist = matcher.state.shortlist is not None
        rng, self.text, self.num_wrong, self.num_asked_whole = np.random.default_rng(seed), b"", 0, 0
        expected = np.zeros((1, 49152 // 32), np.int32)
        for _ in range(num_steps):
            self.num_asked_whole += matcher.state.shortlist is None
            [mask] = backend.masks([matcher])
            fill_next_token_bitmask(reference, expected)
            self.num_wrong += not np.array_equal(mask, expected[0])
            token_id = choose(rng, expected, weights)
            self.text += vocabulary.tokens[token_id]
            assert reference.consume_token(token_id)
            try:
                is_over = matcher.advance(token_id)
            except RequestError:
                self.num_wrong += 1
                return
            assert is_over == reference.is_stopped()
            if is_over:
                return


def choose(rng, mask, weights):
    """Any allowed token; quotes and backslashes often, blanks seldom."""
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    chances = weights[rng.integers(len(weights)), ids]
    return int(rng.choice(ids, p=chances / chances.sum()))


@pytest.fixture
def walks(backend, all_tokens, vocabulary, weights):
    def walk(name, num=5, backend=backend):
        case = CASES[name]
        compiled = backend.compile(backend.translate(params_of(case)))
        args = backend, all_tokens, vocabulary, weights, case
        return [Walk(*args, seed, compiled=compiled) for seed in range(num)]

    return walk


@pytest.mark.parametrize("name", CASES)
def test_masks_equal_those_over_all_tokens(walks, name):
    walked = walks(name)
    assert all(walk.uses_shortlist for walk in walked)
    assert [walk.text for walk in walked if walk.num_wrong] == []


def test_masks_of_random_schemas(backend, all_tokens, vocabulary, weights):
    counts = {"walks": 0, "with a list": 0}

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS)
    def run(schema):
        try:
            compiled = backend.compile(backend.translate(params_of(schema)))
            args = backend, all_tokens, vocabulary, weights, schema
            walks = [Walk(*args, seed, num_steps=12, compiled=compiled) for seed in range(4)]
        except RequestError:
            return
        walk = walks[0]
        assert not any(walk.num_wrong for walk in walks), [walk.text for walk in walks]
        counts["walks"] += 1
        counts["with a list"] += walk.uses_shortlist

    run()
    assert counts["with a list"] > 0.9 * counts["walks"] > 0


def test_digits_of_an_escape_ask_about_all_tokens(backend, all_tokens, vocabulary, weights):
    schema, to_unicode = {"type": "array", "items": BOUNDED, "minItems": 4}, weights.copy()
    to_unicode[:, [token.endswith((b"\\", b"\\u")) or token == b"u" for token in vocabulary.tokens]] = 1e4
    walks = [Walk(backend, all_tokens, vocabulary, to_unicode, schema, seed) for seed in range(5)]
    assert sum(walk.num_asked_whole for walk in walks)
    assert [walk.text for walk in walks if walk.num_wrong] == []


@pytest.mark.parametrize("place", [Place.OUTSIDE, Place.INSIDE, Place.ESCAPING])
def test_each_place_counts(backend, all_tokens, vocabulary, weights, monkeypatch, place):
    """Asked as in another place, the library says other things."""
    other = Place.OUTSIDE if place else Place.INSIDE
    monkeypatch.setitem(backend._json, place, backend._json[other])
    walks = [Walk(backend, all_tokens, vocabulary, weights, CASES["order"], seed) for seed in range(5)]
    assert sum(walk.num_wrong for walk in walks)


@pytest.mark.parametrize(
    ("token", "places"),
    [
        (b'{"a": "', [1, 0, 0, 0]),
        (b'a"', [1, 0, 0, 0]),
        (b"\\", [0, 2, 1, 1]),
        (b'\\"', [1, 1, 0, 0]),
        (b"u12", [0, 1, 5, 1]),
        (b"u1234", [0, 1, 1, 1]),
        (b'n"', [1, 0, 0, 0]),
        (b"4", [0, 1, 1, 1]),
        (b"", [0, 1, 2, 6]),
    ],
)
def test_places_behind_a_token(token, places):
    befores = Place.OUTSIDE, Place.INSIDE, Place.ESCAPING, Place.LAST_DIGIT
    assert [Steps(before, [token])[0] for before in befores] == places


@pytest.mark.parametrize(
    ("name", "part"), [("literals beside strings", "literals"), ("narrow strings", "alphabets")]
)
def test_without_a_part_of_the_list_masks_are_wrong(walks, vocabulary, monkeypatch, name, part):
    def read(schema, read=SchemaTexts.read):
        texts = read(schema)
        setattr(texts, part, set())
        return texts

    monkeypatch.setattr(SchemaTexts, "read", read)
    assert sum(walk.num_wrong for walk in walks(name, backend=GuidanceBackend(vocabulary)))


def test_lengths_count(vocabulary, all_tokens, weights, monkeypatch):
    monkeypatch.setattr(shortlist, "_any", lambda length, any_=shortlist._any: any_(max(1, length - 1)))
    walk = Walk(GuidanceBackend(vocabulary), all_tokens, vocabulary, weights, CASES["order"], num_steps=60)
    assert walk.num_wrong


def test_equal_answers_share_a_mask(backend, vocabulary, monkeypatch):
    grammar = backend.translate(StructuredOutputsParams(json=ORDERS))
    first = backend.compile(grammar)
    matchers = [first.copy() for _ in range(5)]
    for token in b'[{"id":5':
        for matcher in matchers:
            matcher.advance(vocabulary.tokens.index(bytes([token])))
    backend._masks.clear()
    widened, widen = [], Shortlist.widen
    monkeypatch.setattr(Shortlist, "widen", lambda *args: widened.append(args) or widen(*args))
    masks = backend.masks(matchers)
    assert len(widened) == 1 and all(mask is masks[0] for mask in masks) and masks[0].any()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a"},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "pattern": "^(?i)ab$"},
        {"type": "string", "pattern": "^[^a]$"},
        {"type": "string", "pattern": "^a.c$"},
        {"type": "string", "pattern": "^\\w$"},
        {"type": "string", "pattern": "^a\\$"},
        {"type": "string", "format": "email"},
        {"type": "object", "patternProperties": {"a": {}}},
        {"items": {"x-guidance": {"item_separator": "and"}}},
        {"enum": ["x" * 40_000]},
    ],
)
def test_schemas_that_are_given_up(schema):
    assert SchemaTexts.read(schema) is None


def test_what_a_schema_says():
    schema = {
        "title": "Not said",
        "properties": {"title": {"const": {"title": "said"}}},
        "patternProperties": {"^[a-c_]\\d?$": {"type": "string", "pattern": "^(x\\.|yy)*$"}},
    }
    texts = SchemaTexts.read(schema)
    assert {"title", "said"} <= texts.literals and "Not said" not in texts.literals
    assert texts.alphabets == {frozenset("abc-_0123456789"), frozenset("x.y")}


def test_tokens_that_no_text_has_are_wrong(backend, vocabulary):
    grammar = backend.translate(StructuredOutputsParams(json={"type": "string"}))
    matcher = backend.compile(grammar).copy()
    assert not matcher.advance(vocabulary.tokens.index(b'"'))
    with pytest.raises(RequestError):
        matcher.copy().advance(1)  # <|im_start|>: no text, though its letters would fit
    assert not matcher.advance(vocabulary.tokens.index(b"<"))


def names(*words):
    return {"type": "object", "properties": dict.fromkeys(words, BOUNDED)}


def test_schemas_share_lists_that_stay_short(vocabulary):
    """Each list has what its schema needs; the date would make the others' lists long."""
    backend, dated = GuidanceBackend(vocabulary), {"type": "string", "format": "date"}

    def lists(schema):
        return backend.compile(backend.translate(params_of(schema)))._grammar._lists[Place.INSIDE]

    first, second = lists(names("street", "city")), lists(names("title", "street"))
    assert second is lists(names("city", "title")) is lists(names("street", "city"))
    last = lists({"type": "array", "items": dated})
    assert len(first.tokens) < len(second.tokens) < 2 * len(first.tokens) < len(last.tokens)
    assert set(first.tokens) | {b"title"} < set(second.tokens) and b"fed" in last.tokens
    for start in range(1000, 40_000, 1000):
        lists(names(*(token.decode(errors="ignore") for token in vocabulary.tokens[start : start + 150])))
    assert len(backend._json[Place.INSIDE]._shared) == shortlist._MAX_SHARED


def test_an_output_that_opens_has_its_grammar_compiled_beside(vocabulary, monkeypatch):
    """For the places that most outputs come to; the first one, which the checker makes, only begins."""
    backend, begun, begin = GuidanceBackend(vocabulary), [], GuidanceBackend._begin

    def noted(backend, grammar, shortlist):
        begun.append((shortlist, current_thread() is main_thread()))
        return begin(backend, grammar, shortlist)

    monkeypatch.setattr(GuidanceBackend, "_begin", noted)
    first = backend.compile(backend.translate(params_of(ORDERS)))
    assert begun == [(None, True)]
    lists, output = first._grammar._lists, first.copy()
    backend._compilers.shutdown()
    beside = {(lists[place], False) for place in (Place.OUTSIDE, Place.INSIDE)}
    assert len(begun) == 3 and set(begun[1:]) == beside
    assert backend.masks([output])[0].any() and len(begun) == 3


def test_many_literals_are_no_longer_list_than_all_tokens(backend, vocabulary):
    """Half the vocabulary as an enum: the library is asked about all tokens, and is right."""
    texts = sorted({token.decode(errors="ignore") for token in vocabulary.tokens if len(token) > 3})[::4]
    grammar = backend.translate(StructuredOutputsParams(json={"enum": texts}))
    assert len(json.dumps(texts)) < 1 << 20
    assert Place.INSIDE not in backend.compile(grammar)._grammar._lists


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"a word of {i}" for i in range(2000)]},
        {"enum": ["x" * 30_000, "y"]},
        {"type": "string", "pattern": "^" + "(" * 200 + "[a-b]*" + ")*" * 200 + "$"},
        {"type": "string", "pattern": "^(a|a)*" * 50 + "$"},
        {"properties": {f"property_{i}": {"type": "string", "maxLength": i} for i in range(1, 600)}},
    ],
    ids=["many literals", "a long literal", "nested groups", "an ambiguous pattern", "many properties"],
)
def test_hostile_schemas_take_no_long_time_to_read(backend, schema):
    began_s = time.process_time()
    texts = SchemaTexts.read(schema)
    assert texts is None or backend._json[Place.INSIDE].shortlist(texts) is not None
    assert time.process_time() - began_s < 1.5


def test_a_schema_that_is_nested_too_deeply_is_asked_about_all_tokens():
    schema = {"type": "string"}
    for _ in range(20_000):
        schema = {"items": schema}
    assert SchemaTexts.read(schema) is None


# Other forms.

FORMS = {
    "sentences": {"regex": "([A-Z][a-z]{2,11}( [a-z]{1,12}){3,9}[.!?] ){2,60}"},
    "kinds": {"regex": r"\w+\s\d{2,4}[\t\x41\u00e9-\u00ff-]{3}[^\s\W_]+.{2}\S"},
    "negated": {"regex": r"[^a-y\"]{4,40}[^-x][ -~]{5}"},
    "choice": {"choice": ['yes, "indeed"', "no\nor so", "perhaps naïve", "東京 and more"]},
    "grammar": {
        "grammar": r"""
            start: entry ("; " entry)*  // any number
            entry: NAME " = " (NUMBER | "\"" TEXT "\"" | "[" [entry] "]")
            NAME: /[a-z_]{2,12}/
            NUMBER: /-?[0-9]{1,6}(\.[0-9]{1,3})?/
            TEXT: /[^"\n]{5,60}/
        """
    },
    "GBNF": {"grammar": 'root ::= ("x" [0-9]+ | [^a-z] "\\n")+ "xx"'},
}


@pytest.mark.parametrize("name", FORMS)
def test_masks_of_other_forms(backend, all_tokens, vocabulary, weights, name):
    params = StructuredOutputsParams(**FORMS[name])
    compiled = backend.compile(backend.translate(params))
    args = backend, all_tokens, vocabulary, weights, params
    walked = [Walk(*args, seed, compiled=compiled) for seed in range(8)]
    assert len(compiled._grammar._states) > 3 or name == "kinds"  # what is a word beyond ASCII, nobody says
    assert all(walk.uses_shortlist for walk in walked)
    assert [walk.text for walk in walked if walk.num_wrong] == []


END = 0x10FFFF
_ATOMS = st.sampled_from(
    [
        "a",
        "B",
        "[a-f]",
        "[^a-f]",
        '[^"]',
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\.",
        r"\n",
        "[A-Zz_-]",
        "é",
        "[あ-ん]",
        "—",
    ]
)
_REGEXES = st.recursive(
    _ATOMS,
    lambda parts: st.one_of(
        st.lists(parts, min_size=2, max_size=4).map("".join),
        st.lists(parts, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "{2,9}", "{3}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)


def test_masks_of_random_regular_expressions(backend, all_tokens, vocabulary, weights):
    counts = {"walks": 0, "with a list": 0}

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_REGEXES)
    def run(regex):
        params = StructuredOutputsParams(regex=regex)
        try:
            compiled = backend.compile(backend.translate(params))
            args = backend, all_tokens, vocabulary, weights, params
            walks = [Walk(*args, seed, num_steps=10, compiled=compiled) for seed in range(5)]
        except RequestError:
            return
        walk = walks[0]
        assert not any(walk.num_wrong for walk in walks), [walk.text for walk in walks]
        counts["walks"] += 1
        counts["with a list"] += walk.uses_shortlist

    run()
    assert counts["with a list"] > 0.5 * counts["walks"] > 0


@pytest.mark.parametrize(
    ("name", "changed"),
    [("sentences", {"ranges": {(0x20, 0x7A), (END, END)}}), ("grammar", {"is_open": False})],
)
def test_an_alphabet_that_is_too_small_is_wrong(
    backend, all_tokens, vocabulary, weights, monkeypatch, name, changed
):
    alphabet = Alphabet.read(backend.translate(StructuredOutputsParams(**FORMS[name])))
    for field, value in changed.items():
        monkeypatch.setattr(alphabet, field, value)
    monkeypatch.setattr(Alphabet, "read", lambda grammar: alphabet)
    params = StructuredOutputsParams(**FORMS[name])
    assert sum(Walk(backend, all_tokens, vocabulary, weights, params, seed).num_wrong for seed in range(4))


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a".."z"',
        'start: "yes"i',
        "start: /a/i",
        r"start: /\p{Greek}/",
        "start: /(?i)ab/",
        "start: /[a-z&&[^b]]/",
        "start: /[[:alpha:]]/",
        r"start: /[a-\d]/",
        "start: <think>",
        'start: %json {"type": "object"}',
        "start[max_tokens=5]: /.*/",
        'start: "\\q"',
        "start: @other",
    ],
)
def test_grammars_that_are_given_up(lark):
    assert Alphabet.read(f"header\n{lark}") is None


def test_what_a_grammar_tells_apart():
    alphabet = Alphabet.read('header\nstart: "é" /[a-f\\-x-]\\t+/ // "z"')
    codes = sorted(alphabet.ranges)[:-1]
    assert [chr(first) + chr(last) for first, last in codes] == ["\t\t", "--", "af", "xx", "éé"]
    assert not alphabet.is_open and Alphabet.read("header\nstart: /[^a]/").is_open
