"""GET /v1/models and /v1/models/{id}: the names under which models may be asked for, and how these are.

GET /models tells the same, for clients of llama.cpp's router.
"""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.requests.media import Modality
from octavo.messages.sampling import SamplingParams
from octavo.serving.caller import Caller
from octavo.serving.engines import Listed, State
from octavo.serving.openai.answers import json_response
from octavo.serving.registry import Route

_SHOWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class ModelStatus(msgspec.Struct, omit_defaults=True):
    """How a model is."""

    value: State
    failed: bool = False
    error: str = ""
    """Why it could not be loaded."""


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    """None, as long as nobody has asked for the model."""
    default_parameters: dict[str, float]
    """What holds where a chat request says nothing: the model's recommendation, then octavo's defaults."""
    status: ModelStatus
    input_modalities: tuple[Modality, ...] = ("text",)
    tasks: tuple[str, ...] | None = None
    """To generate, or what it makes of texts, and "score" where /score and /rerank answer; None as above."""
    object: Literal["model"] = "model"
    owned_by: str = "octavo"
    parent: str | None = None
    """The base model of an adapter."""
    permission: list[dict[str, str]] = []


class ModelList(msgspec.Struct):
    """Every served name."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(request: Request) -> Response:
    """The names of all models and adapters, and whether these are loaded."""
    return json_response(ModelList([card(listed) for listed in Caller.of(request).engines.listed()]))


async def show_model(request: Request) -> Response:
    """One model; 404 for a name that is not served."""
    engines = Caller.of(request).engines
    name = engines.resolve(request.path_params["model"] or "/")
    return json_response(next(card(listed) for listed in engines.listed() if listed.name == name))


def card(listed: Listed) -> ModelCard:
    """What is told of a served name."""
    defaults: dict[str, float] = {}
    modalities: tuple[Modality, ...] = ("text",)
    tasks: tuple[str, ...] | None = None if listed.config is None else ("generate",)
    pooling = listed.config.pooling if listed.config is not None else None
    if pooling is not None:
        scores = pooling.is_embedder or pooling.num_labels == 1
        tasks = *pooling.tasks, *(("score",) if scores else ())
    if listed.engine is not None:
        modalities = listed.engine.input_processor.media.modalities
        values = listed.engine.input_processor.default_sampling_values()
        params = SamplingParams(**(values | {"max_tokens": None}))
        defaults = {key: getattr(params, key) for key in _SHOWN}
    return ModelCard(
        id=listed.name,
        created=listed.created,
        root=listed.root,
        max_model_len=listed.config.model.max_model_len if listed.config is not None else None,
        default_parameters=defaults,
        parent=listed.parent,
        input_modalities=modalities,
        tasks=tasks,
        status=ModelStatus(listed.state, listed.state == "failed", listed.fault),
    )


ROUTES = [
    Route("/v1/models", list_models, response_model=ModelList),
    Route("/models", list_models, response_model=ModelList),
    Route("/v1/models/{model:path}", show_model, response_model=ModelCard),
]
