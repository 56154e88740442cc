"""GET /v1/models and /v1/models/{id}: the names under which the model may be asked for."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.messages.sampling import SamplingParams
from octavo.serving.caller import Caller
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
    """The base model of an adapter."""
    permission: list[dict[str, str]] = []


class ModelList(msgspec.Struct):
    """Every served name."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(request: Request) -> Response:
    """The names of the served model, and of its adapters."""
    caller = Caller.of(request)
    names = [*caller.engines.models.names, *(entry.name for entry in caller.engines.adapters.listed())]
    return json_response(ModelList([card(caller, name) for name in names]))


async def show_model(request: Request) -> Response:
    """One model; 404 for a name that is not served."""
    caller = Caller.of(request)
    return json_response(card(caller, caller.engines.resolve(request.path_params["model"] or "/")))


def card(caller: Caller, name: str) -> ModelCard:
    """What is told of a served name."""
    values = caller.engine.input_processor.default_sampling_values()
    params = SamplingParams(**(values | {"max_tokens": None}))
    defaults = {key: getattr(params, key) for key in _SHOWN}
    models, adapter = caller.engines.models, caller.engines.adapters.known(name)
    made = ModelCard(name, models.created, models.root, models.max_model_len, defaults)
    if name not in models.names and adapter is not None:
        made.root, made.parent = adapter.path, adapter.parent or models.names[0]
    return made


ROUTES = [
    Route("/v1/models", list_models, response_model=ModelList),
    Route("/v1/models/{model:path}", show_model, response_model=ModelCard),
]
