"""GET /api/tags, ps and version, POST /api/show, embed and embeddings: models and vectors as Ollama's."""

import hashlib
import time
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.config.engine import EngineConfig
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.engines import Listed
from octavo.serving.errors import HTTPError
from octavo.serving.model_pool.footprint import file_bytes
from octavo.serving.ollama import protocol
from octavo.serving.ollama.writing import error_response
from octavo.serving.ollama.written_answer import moment
from octavo.serving.openai.answers import json_response
from octavo.serving.pooling.embeddings import embed
from octavo.serving.pooling.protocol import EmbeddingRequest, Embeddings
from octavo.serving.pooling.work import check_pooling
from octavo.serving.registry import Route
from octavo.serving.streaming import leaving, unless_gone
from octavo.version import __version__

_FOREVER_S = 100 * 365 * 86400.0
_NOT_HERE = "Models come from files, folders and the hub: start octavo serve with --models or --models-dir"


async def tags(request: Request) -> Response:
    """The models that may be asked for, in Ollama's form."""
    return json_response(protocol.Tags([_tag(listed) for listed in Caller.of(request).engines.listed()]))


async def ps(request: Request) -> Response:
    """The models that are loaded or asleep, in Ollama's form."""
    listed = (one for one in Caller.of(request).engines.listed() if not one.is_alias)
    return json_response(
        protocol.Tags([_running(one) for one in listed if one.state in ("loaded", "sleeping")])
    )


async def show(request: Request) -> Response:
    """One model in detail, in Ollama's form."""
    body = await read_body(request, protocol.OllamaShow, any_type=True)
    engines = Caller.of(request).engines
    name = engines.resolve(body.model or body.name or "/")
    listed = next(listed for listed in engines.listed() if listed.name == name)
    config, engine = listed.config, listed.engine
    defaults = engine.input_processor.default_sampling_values() if engine is not None else {}
    tokenizer = engine.tokenizer if engine is not None else None
    shown = protocol.Shown(
        modelfile=f"FROM {listed.root}\n",
        parameters="\n".join(f"{key} {value}" for key, value in defaults.items()),
        template=(tokenizer.chat_template or "") if tokenizer is not None else "",
        details=_details(config),
        model_info=_model_info(config),
        capabilities=_capabilities(listed),
        modified_at=moment(listed.created),
    )
    return json_response(shown)


async def version(request: Request) -> Response:
    """The version of octavo, in Ollama's form."""
    return json_response(protocol.OllamaVersion(__version__))


async def ollama_embed(request: Request) -> Response:
    """The vector of each text, in Ollama's form."""
    began_s = time.monotonic()
    body = await read_body(request, protocol.OllamaEmbed, takes_place=True, any_type=True)
    loaded_s = time.monotonic()
    made = await _embedded(request, body, body.input, truncates=body.truncate is not False)
    whole_ns, load_ns = int((time.monotonic() - began_s) * 1e9), int((loaded_s - began_s) * 1e9)
    vectors = [item.embedding for item in made.data]
    return json_response(protocol.Embedded(body.model, vectors, whole_ns, load_ns, made.usage.prompt_tokens))


async def ollama_embeddings(request: Request) -> Response:
    """The vector of one text, in Ollama's earlier form."""
    body = await read_body(request, protocol.OllamaEmbeddings, takes_place=True, any_type=True)
    made = await _embedded(request, body, body.prompt, truncates=True)
    return json_response(protocol.EmbeddedOne(made.data[0].embedding))


async def refuse(request: Request) -> Response:
    """Say that the server keeps no library of models."""
    raise HTTPError(404, f"{request.url.path} is not there. {_NOT_HERE}.")


async def _embedded(
    request: Request, body: protocol.OllamaFields, texts: str | list[str], *, truncates: bool
) -> Embeddings:
    caller = Caller.of(request).asking(body.model)
    check_pooling(caller, request.url.path)
    caller.engines.keep(caller.model, body.keep_s)
    if not texts:
        raise RequestError("Give a text, or a list of texts.", "input")
    asked = EmbeddingRequest(
        model=body.model,
        input=texts,
        dimensions=getattr(body, "dimensions", None),
        truncate_prompt_tokens=-1 if truncates else None,
    )
    made = await unless_gone(leaving(request.receive), embed(caller, asked))
    assert isinstance(made, Embeddings)
    return made


def _tag(listed: Listed) -> protocol.Tag:
    return protocol.Tag(
        name=listed.name,
        model=listed.name,
        modified_at=moment(listed.created),
        size=file_bytes(Path(listed.config.checkpoint.path)) if listed.config else 0,
        digest=hashlib.sha256(listed.root.encode()).hexdigest(),
        details=_details(listed.config),
    )


def _running(listed: Listed) -> protocol.Tag:
    tag, config = _tag(listed), listed.config
    assert config is not None
    left_s = min(listed.expires_in_s, _FOREVER_S)
    tag.expires_at = moment(time.time() + left_s)
    tag.size_vram = tag.size if config.parallel.device != "cpu" and listed.state == "loaded" else 0
    tag.context_length = config.model.max_model_len
    return tag


def _details(config: EngineConfig | None) -> protocol.Details:
    if config is None:
        return protocol.Details()
    family = _family(config)
    quantization = config.model.quantization or config.model.dtype
    return protocol.Details("", config.checkpoint.format, family, [family], "", quantization)


def _family(config: EngineConfig) -> str:
    return str(config.checkpoint.text_config.get("model_type") or config.checkpoint.architecture)


def _model_info(config: EngineConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    family = _family(config)
    return {
        "general.architecture": family,
        f"{family}.context_length": config.model.max_model_len,
        f"{family}.vocab_size": config.checkpoint.vocab_size,
    }


def _capabilities(listed: Listed) -> list[str]:
    if listed.config is None:
        return []
    if listed.config.pooling is not None:
        return ["embedding"]
    if listed.engine is None:
        return ["completion"]
    chat = listed.engine.chat
    able = {
        "tools": chat.has_template,
        "thinking": bool(chat.reasoning_parser),
        "vision": "image" in listed.engine.input_processor.media.modalities,
    }
    return ["completion", *(name for name, is_able in able.items() if is_able)]


_Route = partial(Route, error_model=protocol.OllamaError, error_response=error_response)
_LIBRARY = ("pull", "push", "create", "copy", "delete")
ROUTES = [
    _Route("/api/tags", tags, response_model=protocol.Tags),
    _Route("/api/ps", ps, response_model=protocol.Tags),
    _Route("/api/version", version, response_model=protocol.OllamaVersion),
    _Route("/api/show", show, protocol.OllamaShow, protocol.Shown),
    _Route("/api/embed", ollama_embed, protocol.OllamaEmbed, protocol.Embedded),
    _Route("/api/embeddings", ollama_embeddings, protocol.OllamaEmbeddings, protocol.EmbeddedOne),
    *(
        _Route(f"/api/{verb}", refuse, methods=("GET", "POST", "DELETE"), documented=False)
        for verb in _LIBRARY
    ),
]
