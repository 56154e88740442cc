"""POST /v1/embeddings, /v1/embed and /v2/embed (Cohere), /pooling and /classify."""

from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from octavo.base.errors import RequestError, wrong
from octavo.frontend.media.inputs import MediaURL
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.prompts import PromptType
from octavo.messages.pooling import PoolingParams
from octavo.serving.caller import Caller
from octavo.serving.pooling import protocol
from octavo.serving.pooling.numbers import raw, signs, written
from octavo.serving.pooling.work import Answer, PoolingWork, arrays, routes_of, usage_of

_SIDES = {"NONE": None, "START": "left", "END": "right"}


async def embed(caller: Caller, body: protocol.EmbeddingRequest) -> protocol.Embeddings | Response:
    """The vector of each text."""
    work = PoolingWork.of(caller, body, "embd")
    params = PoolingParams(body.use_activation, body.dimensions, task="embed")
    outputs = await work.run(await work.prompts(body), params)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _as_bytes(work, body.form, outputs)
    items = [protocol.Item(i, written(vector, body.form)) for i, vector in enumerate(arrays(outputs))]
    return protocol.Embeddings(work.id, work.created, work.caller.model, items, usage_of(outputs))


async def pool(caller: Caller, body: protocol.PoolingRequest) -> protocol.PooledData | Response:
    """The result of each text, of any task that the model has: nested lists where each token has a vector."""
    work = PoolingWork.of(caller, body, "pool")
    task: Any = body.task
    params = PoolingParams(body.use_activation, body.dimensions, body.step_tag_id, task=task)
    outputs = await work.run(await work.prompts(body), params)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _as_bytes(work, body.form, outputs)
    items = [protocol.PooledItem(i, written(data, body.form)) for i, data in enumerate(arrays(outputs))]
    return protocol.PooledData(work.id, work.created, work.caller.model, items, usage_of(outputs))


async def classify(caller: Caller, body: protocol.ClassificationRequest) -> protocol.Classification:
    """The probability of each label, for each text."""
    work = PoolingWork.of(caller, body, "classify")
    params = PoolingParams(body.use_activation, task="classify")
    outputs = await work.run(await work.prompts(body), params)
    labels, items = work.pooling.labels, []
    for index, probs in enumerate(arrays(outputs)):
        best = int(probs.argmax())
        label = labels[best] if best < len(labels) else None
        items.append(protocol.ClassItem(index, label, probs.tolist(), len(probs)))
    return protocol.Classification(work.id, work.created, work.caller.model, items, usage_of(outputs))


async def answer_to_texts(caller: Caller, body: protocol.PoolingRequest) -> Struct | Response:
    """What the model is for: vectors, labels, or the results of another task."""
    pooling = caller.asking(body.model).engine.config.pooling
    kinds: dict[str, Answer] = {"embed": embed, "classify": classify}
    return await kinds.get(body.task or (pooling.tasks[0] if pooling else ""), pool)(caller, body)


async def cohere_embed(caller: Caller, body: protocol.CohereEmbedRequest) -> protocol.CohereEmbeddings:
    """The vectors of texts, by type, in Cohere's form."""
    if sum(given is not None for given in (body.texts, body.images, body.inputs)) != 1:
        raise RequestError("Give texts, images or inputs, one of them.", "texts")
    side = _SIDES[body.truncate or "END"]
    longest, keep = caller.asking(body.model).engine.config.model.max_model_len, body.max_tokens or -1
    fields = protocol.PoolingFields(
        model=body.model,
        priority=body.priority,
        truncate_prompt_tokens=(keep if keep < longest else -1) if side else None,
        truncation_side="left" if side == "left" else "right",
    )
    work = PoolingWork.of(caller, fields, "embd")
    name = body.input_type if body.input_type in work.pooling.prompts else None
    prompts = [work.instructed(text, name) for text in body.texts or ()]
    prompts += [_with_images("", [url]) for url in body.images or ()]
    for text, urls in map(_read_parts, body.inputs or ()):
        prompts.append(_with_images(text, urls) if urls else work.instructed(text, name))
    params = PoolingParams(dimensions=body.output_dimension, task="embed")
    outputs = await work.run(prompts, params)
    vectors = arrays(outputs)
    makers: dict[str, Any] = {
        "float": lambda v: v.tolist(),
        "base64": lambda v: written(v, protocol.EmbeddingFormat("base64")),
        "binary": lambda v: signs(v, signed=True),
        "ubinary": lambda v: signs(v, signed=False),
    }
    made: dict[str, list[Any]] = {
        kind: [makers[kind](v) for v in vectors] for kind in body.embedding_types or ["float"]
    }
    tokens = usage_of(outputs).prompt_tokens
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}
    return protocol.CohereEmbeddings(work.id, made, body.texts or [], meta)


async def cohere_embed_first(
    caller: Caller, body: protocol.CohereEmbedRequest
) -> protocol.CohereFloats | protocol.CohereEmbeddings:
    """The vectors of texts in the first form of Cohere's: a list of them, unless the body names types."""
    made = await cohere_embed(caller, body)
    made.meta["api_version"] = {"version": "1"}
    if body.embedding_types:
        return made
    return protocol.CohereFloats(made.id, made.embeddings["float"], made.texts, made.meta)


def _with_images(text: str, urls: list[str]) -> PromptType:
    images = [MediaURL(url) for url in urls]
    return {"prompt": text, "multi_modal_data": {"image": images[0] if len(images) == 1 else images}}


def _read_parts(given: dict[str, Any]) -> tuple[str, list[str]]:
    """The text and the URLs of one of Cohere's inputs. Raises RequestError."""
    found: dict[str, list[str]] = {"text": [], "image_url": []}
    for part in given.get("content") or [None]:
        match part:
            case {"type": "text", "text": str(word)} | {"type": "image_url", "image_url": {"url": str(word)}}:
                found[part["type"]].append(word)
            case _:
                raise wrong("inputs", "must hold content: parts of type text or image_url")
    return "\n".join(found["text"]), found["image_url"]


def _as_bytes(work: PoolingWork, form: protocol.EmbeddingFormat, outputs: list[RequestOutput]) -> Response:
    """All numbers as they are; unless they alone are wanted, a header says where each result lies."""
    parts, data, start = [], [], 0
    for index, array in enumerate(arrays(outputs)):
        parts.append(raw(array, form))
        end = start + len(parts[-1])
        place = {"index": index, "start": start, "end": end, "shape": list(array.shape)}
        form_of = {"embed_dtype": form.dtype or "float32", "endianness": form.order or "native"}
        data.append(place | form_of)
        start = end
    headers = {}
    if form.encoding == "bytes":
        usage = msgspec.to_builtins(usage_of(outputs))
        told = {"id": work.id, "created": work.created, "model": work.caller.model, "data": data}
        headers["metadata"] = msgspec.json.encode(told | {"usage": usage}).decode("ascii")
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")


ANSWERS: dict[str, tuple[type[Struct], Answer]] = {
    "/v1/embeddings": (protocol.EmbeddingRequest, embed),
    "/v1/embed": (protocol.CohereEmbedRequest, cohere_embed_first),
    "/v2/embed": (protocol.CohereEmbedRequest, cohere_embed),
    "/pooling": (protocol.PoolingRequest, pool),
    "/classify": (protocol.ClassificationRequest, classify),
}
ROUTES = routes_of(ANSWERS)
