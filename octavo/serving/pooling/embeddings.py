"""POST /v1/embeddings, /v2/embed (Cohere), /pooling and /classify."""

from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.frontend.media.inputs import MediaURL
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.messages.pooling import PoolingParams
from octavo.serving.caller import Caller
from octavo.serving.pooling import protocol
from octavo.serving.pooling.numbers import raw, signs, written
from octavo.serving.pooling.work import Answer, PoolingWork, arrays, served, usage_of
from octavo.serving.registry import Route

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


async def cohere_embed(caller: Caller, body: protocol.CohereEmbedRequest) -> protocol.CohereEmbeddings:
    """The vectors of texts, by type, in Cohere's form."""
    if (body.texts is None) == (body.images is None):
        raise RequestError("Give texts or images, one of them; inputs are not supported.", "texts")
    side = _SIDES[body.truncate or "END"]
    fields = protocol.PoolingFields(
        model=body.model,
        priority=body.priority,
        truncate_prompt_tokens=-1 if side else None,
        truncation_side="left" if side == "left" else "right",
    )
    work = PoolingWork.of(caller, fields, "embd")
    name = body.input_type if body.input_type in work.pooling.prompts else None
    prompts = [work.instructed(text, name) for text in body.texts or ()]
    prompts += [{"prompt": "", "multi_modal_data": {"image": MediaURL(url)}} for url in body.images or ()]
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
    "/v2/embed": (protocol.CohereEmbedRequest, cohere_embed),
    "/pooling": (protocol.PoolingRequest, pool),
    "/classify": (protocol.ClassificationRequest, classify),
}
_FORMS = {
    embed: protocol.Embeddings,
    cohere_embed: protocol.CohereEmbeddings,
    pool: protocol.PooledData,
    classify: protocol.Classification,
}
ROUTES = [
    Route(path, served(model, answer), model, _FORMS[answer]) for path, (model, answer) in ANSWERS.items()
]
