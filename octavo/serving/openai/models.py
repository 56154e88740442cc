"""GET /v1/models and /v1/models/{id}: the names under which the model may be asked for."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.serving.engines import ServedModels
from octavo.serving.openai.answers import json_response
from octavo.serving.registry import Route


class ModelCard(msgspec.Struct):
    """One served name."""

    id: str
    created: int
    root: str
    max_model_len: int
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
    models: ServedModels = request.app.state.engines.models
    body = ModelList([card(models, name) for name in models.names])
    return json_response(body)


async def show_model(request: Request) -> Response:
    """One model; 404 for a name that is not served."""
    models: ServedModels = request.app.state.engines.models
    name = models.resolve(request.path_params["model"] or "/")
    return json_response(card(models, name))


def card(models: ServedModels, name: str) -> ModelCard:
    """What is told of a served name."""
    return ModelCard(id=name, created=models.created, root=models.root, max_model_len=models.max_model_len)


ROUTES = [
    Route("/v1/models", list_models, response_model=ModelList),
    Route("/v1/models/{model:path}", show_model, response_model=ModelCard),
]
