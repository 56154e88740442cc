"""GET /v1/models and /v1/models/{id}: the names under which the model may be asked for."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.messages.sampling import SamplingParams
from octavo.serving.caller import Caller
from octavo.serving.engines import ServedModels
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


class ModelCard(msgspec.Struct):
    """One served name."""

    id: str
    created: int
    root: str
    max_model_len: int
    default_parameters: dict[str, float]
    """What holds where a chat request says nothing: the model's recommendation, then octavo's defaults."""
    input_modalities: tuple[Literal["text", "image"], ...] = ("text",)
    object: Literal["model"] = "model"
    owned_by: str = "octavo"
    parent: str | None = None
    permission: list[dict[str, str]] = []


class ModelList(msgspec.Struct):
    """Every served name."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(request: Request) -> Response:
    """The names of the served model."""
    caller = Caller.of(request)
    models: ServedModels = request.app.state.engines.models
    body = ModelList([card(caller, models, name) for name in models.names])
    return json_response(body)


async def show_model(request: Request) -> Response:
    """One model; 404 for a name that is not served."""
    models: ServedModels = request.app.state.engines.models
    name = models.resolve(request.path_params["model"] or "/")
    return json_response(card(Caller.of(request), models, name))


def card(caller: Caller, models: ServedModels, name: str) -> ModelCard:
    """What is told of a served name."""
    values = caller.engine.input_processor.default_sampling_values()
    params = SamplingParams(**(values | {"max_tokens": None}))
    defaults = {key: getattr(params, key) for key in _SHOWN}
    return ModelCard(name, models.created, models.root, models.max_model_len, defaults)


ROUTES = [
    Route("/v1/models", list_models, response_model=ModelList),
    Route("/v1/models/{model:path}", show_model, response_model=ModelCard),
]
