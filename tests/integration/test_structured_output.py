"""Structured output with the real default model: every kind, every way in, beside plain requests."""

import asyncio
import json
import re
import time

import jsonschema
import msgspec
import pytest

from octavo import LLM, AsyncLLM, EngineArgs, RequestError, SamplingParams, StructuredOutputsParams
from octavo.frontend.requests.vocabulary_file import VocabularyFile
from octavo.frontend.text.loader import load_tokenizer
from octavo.messages.structured import Vocabulary

pytestmark = pytest.mark.matrix(3)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "quick"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {
        "type": "object",
        "properties": {
            "v": {"type": "integer"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["v", "next"],
        "additionalProperties": False,
    }},
    "$ref": "#/$defs/node",
}  # fmt: skip
SCHEMAS = [
    PERSON,
    TREE,
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"enum": ["a", 1, None]},
]


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), max_model_len=512, num_gpu_blocks_override=600) as llm:
        yield llm


def ask(llm, prompt="Describe a person as JSON.\n", max_tokens=40, **values):
    [output] = llm.generate([prompt], SamplingParams(max_tokens=max_tokens, **values), use_tqdm=False)
    return output.outputs


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schemas(llm, schema, temperature):
    [completion] = ask(llm, temperature=temperature, seed=5, structured_outputs={"json": schema})
    if completion.finish_reason == "stop":
        jsonschema.validate(json.loads(completion.text), schema)
    else:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 40)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'root ::= "SELECT " [a-z]+ " FROM " [a-z]+ ";"'}, "SELECT [a-z]+ FROM [a-z]+;"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_the_other_kinds(llm, form, pattern):
    [completion] = ask(llm, max_tokens=120, temperature=0, guided_decoding=StructuredOutputsParams(**form))
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert re.fullmatch(pattern, completion.text)


def test_the_same_alone_and_in_company(llm):
    forms = [{"json": PERSON}, {"regex": "[A-Z][a-z]{2,9}( [a-z]+)*\\."}, {"choice": ["yes", "no"]}, None]
    params = [
        SamplingParams(max_tokens=14, seed=n, structured_outputs=forms[n % 4], logprobs=1, n=1 + n % 2)
        for n in range(7)
    ]
    prompts = [f"Question {n}:" for n in range(7)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        [alone] = llm.generate([prompt], param, use_tqdm=False)
        assert alone.outputs == output.outputs


THINKING = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\\n' if thinks else '<think></think>' }}{% endif %}"
)


def test_reasoning_comes_before_the_form(smollm2_path):
    """As much as its budget allows; after that, and where the template has ended it, the form holds."""
    options = {"max_model_len": 256, "num_gpu_blocks_override": 100, "chat_template": THINKING}
    messages = [{"role": "user", "content": "Describe a person as JSON."}]
    with LLM(str(smollm2_path), reasoning_parser="think", **options) as llm:
        for thinks, after, budget in ((True, True, 6), (False, True, None), (True, None, None)):
            form = StructuredOutputsParams(json=PERSON, after_reasoning=after)
            params = SamplingParams(
                max_tokens=90, temperature=0, structured_outputs=form, thinking_token_budget=budget
            )
            [output] = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs={"thinks": thinks})
            completion = output.outputs[0]
            thought, closing, answer = completion.text.partition("</think>")
            assert bool(closing) == (budget is not None)
            if budget is not None:
                assert 6 < len(completion.token_ids) - len(llm.get_tokenizer().encode(answer)) < 20
            assert completion.finish_reason == "stop"
            jsonschema.validate(json.loads(answer if closing else thought), PERSON)


def test_stop_strings_and_streamed_text(llm):
    [completion] = ask(llm, temperature=0, stop=['"age"'], structured_outputs={"json": PERSON})
    assert (completion.finish_reason, completion.stop_reason) == ("stop", '"age"')
    assert completion.text.startswith("{") and '"age"' not in completion.text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"structured_outputs": {"regex": "(["}}, "unclosed"),
        ({"structured_outputs": {"json": {"not": {}}}}, "Unimplemented"),
        ({"guided_grammar": 'other ::= "a"'}, "No 'root' rule"),
        ({"guided_json": {}, "use_beam_search": True, "temperature": 0}, "cannot be used with beam search"),
    ],
)  # fmt: skip
def test_what_is_refused_is_a_request_error(llm, values, text):
    with pytest.raises(RequestError, match=re.escape(text)):
        ask(llm, **values)
    assert ask(llm, max_tokens=2)[0].finish_reason == "length"


async def _last(engine, prompt, **values):
    outputs = [output async for output in engine.generate(prompt, SamplingParams(**values))]
    return outputs[-1].outputs[0]


@pytest.mark.parametrize("executor", ["inproc", pytest.param("mp", marks=pytest.mark.slow)])
async def test_in_processes_of_their_own(smollm2_path, executor):
    """The grammar crosses both doors; meanwhile a plain request streams, and a huge grammar is compiled."""
    args = EngineArgs(
        model=str(smollm2_path),
        max_model_len=256,
        num_gpu_blocks_override=200,
        distributed_executor_backend=executor,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        plain = asyncio.create_task(_last(engine, "Once", max_tokens=60, ignore_eos=True, temperature=0))
        enum = {"enum": [f"v{number * 7919}" for number in range(10_000)]}
        huge = asyncio.create_task(_last(engine, "Pick one:", max_tokens=20, guided_json=enum))
        answer = await _last(engine, "Number:", max_tokens=20, guided_regex=r"\d{4}")
        assert re.fullmatch(r"\d{4}", answer.text)
        assert json.loads((await huge).text) in enum["enum"]
        assert len((await plain).token_ids) == 60
        with pytest.raises(RequestError, match="unclosed"):
            await _last(engine, "x", guided_regex="([")
    finally:
        await engine.shutdown()


def test_the_vocabulary_spells_what_the_tokenizer_reads(smollm2_path, gemma3_path):
    """Byte-level BPE and SentencePiece with byte fallback: tokens joined are the text."""
    for path in (smollm2_path, gemma3_path):
        tokenizer = load_tokenizer(path)
        file = VocabularyFile(tokenizer, len(tokenizer) + 5, [1])
        vocabulary = msgspec.msgpack.decode(file.path.read_bytes(), type=Vocabulary)
        file.close()
        assert len(vocabulary.tokens) == len(tokenizer) + 5 and vocabulary.tokens[-1] == b""
        for text in ('{"naïve": "Größe 日本 👍", "n": -1.5e3}\n\t', "plain words, and  blanks"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(vocabulary.tokens[i] for i in ids).decode() == text


@pytest.mark.slow
def test_nothing_is_paid_by_those_who_do_not_ask(smollm2_path):
    """Neither process nor vocabulary before the first grammar."""
    with LLM(str(smollm2_path), max_model_len=128, num_gpu_blocks_override=40) as llm:
        ask(llm, max_tokens=2)
        grammars = llm.llm_engine.input_processor.grammars
        assert not grammars._idle and not grammars._vocabulary
        start = time.monotonic()
        ask(llm, max_tokens=2, structured_outputs={"choice": ["a", "b"]})
        assert time.monotonic() - start < 20 and grammars._idle
