"""POST /tokenize and /detokenize: the tokenizer alone. The work is bounded, and done off the event loop."""

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError, Unsupported, wrong
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.serving.body import borrow, read_body
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import json_response
from octavo.serving.openai.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from octavo.serving.openai.tools import ToolUse
from octavo.serving.openai.turn import render_options
from octavo.serving.registry import Route

MAX_CHARS = 2**20
MAX_TOKENS = 2**17


class Tokens(msgspec.Struct):
    """A text in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Tokens as a text."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of a conversation as the model would get it."""
    caller = Caller.of(request)
    body = await read_body(request, TokenizeRequest, takes_place=True)
    caller = caller.asking(body.model)
    tokenizer = _tokenizer(caller)
    with caller.engine.reserve():
        text, has_special_tokens = await _text(caller, body)
        if len(text) > MAX_CHARS:
            raise RequestError(f"A text may have {MAX_CHARS} characters, got {len(text)}.", "prompt")
        wanted = body.add_special_tokens
        adds = not has_special_tokens if wanted is None else wanted
        ids = await caller.engine.off_loop(partial(tokenizer.encode, text, adds))
    names = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    tokens = Tokens(len(ids), caller.engine.config.model.max_model_len, ids, names)
    return json_response(tokens)


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    caller = Caller.of(request)
    body = await read_body(request, DetokenizeRequest, takes_place=True)
    caller = caller.asking(body.model)
    tokenizer, size = _tokenizer(caller), caller.engine.config.checkpoint.vocab_size
    if len(body.tokens) > MAX_TOKENS:
        raise wrong("tokens", f"may hold {MAX_TOKENS} ids, got {len(body.tokens)}")
    if body.tokens and max(body.tokens) >= size:
        raise RequestError(f"Token id {max(body.tokens)} is out of vocabulary (0 to {size - 1}).", "tokens")
    with caller.engine.reserve():
        text = await caller.engine.off_loop(partial(tokenizer.decode, body.tokens, skip_special_tokens=False))
    return json_response(Detokenized(text))


async def tokenizer_info(request: Request) -> Response:
    """What a client needs to render and to split texts as this tokenizer does: its marks and its template."""
    await borrow(request, None)
    caller = Caller.of(request)
    tokenizer = _tokenizer(caller)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    marks = {key: getattr(tokenizer, key) for name in names for key in (name, f"{name}_id")}
    ids = tokenizer.all_special_ids
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **marks,
        "additional_special_tokens": tokenizer.convert_ids_to_tokens(ids),
        "all_special_ids": ids,
        "vocab_size": len(tokenizer),
        "model_max_length": caller.engine.config.model.max_model_len,
        "chat_template": tokenizer.chat_template,
    }
    return Response(msgspec.json.encode(described), media_type="application/json")


async def _text(caller: Caller, body: TokenizeRequest) -> tuple[str, bool]:
    """The text, and whether its special tokens are written out in it."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give prompt or messages, one of them.", "prompt")
    if body.messages is None:
        return body.prompt or "", False
    tools = ToolUse.of(ChatRequest(messages=body.messages, tools=body.tools)).described()
    rendered = await caller.engine.render(body.messages, **render_options(caller, body), tools=tools)
    return rendered.get("prompt") or "", True


def _tokenizer(caller: Caller) -> Tokenizer:
    if caller.engine.tokenizer is None:
        raise Unsupported("The server was started with --skip-tokenizer-init: it knows token ids only.")
    return caller.engine.tokenizer


ROUTES = [
    Route("/tokenizer_info", tokenizer_info),
    Route("/tokenize", tokenize, TokenizeRequest, Tokens),
    Route("/detokenize", detokenize, DetokenizeRequest, Detokenized),
]
