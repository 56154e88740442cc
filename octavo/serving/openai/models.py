"""GET /v1/models and /v1/models/{id}, and the names under which the model may be asked for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import UnknownModel
from octavo.config.engine import EngineConfig
from octavo.serving.openai.answers import encode
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


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The names of the one model; the first is used in answers to requests that give none."""

    names: Sequence[str]
    root: str
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, config: EngineConfig) -> "ServedModels":
        """As the options say."""
        return cls(config.served_names, config.model.model, config.model.max_model_len)

    def resolve(self, asked: str | None) -> str:
        """The name to answer with. Raises UnknownModel."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            raise UnknownModel(f"The model {asked[:200]!r} does not exist. Served here: {served}.", "model")
        return asked

    def card(self, name: str) -> ModelCard:
        """What is told of a served name."""
        return ModelCard(id=name, created=self.created, root=self.root, max_model_len=self.max_model_len)


async def list_models(request: Request) -> Response:
    """The names of the served model."""
    models: ServedModels = request.app.state.models
    body = ModelList([models.card(name) for name in models.names])
    return Response(encode(body), media_type="application/json")


async def show_model(request: Request) -> Response:
    """One model; 404 for a name that is not served."""
    models: ServedModels = request.app.state.models
    name = request.path_params["model"] or "/"
    return Response(encode(models.card(models.resolve(name))), media_type="application/json")


ROUTES = [
    Route("/v1/models", list_models, response_model=ModelList),
    Route("/v1/models/{model:path}", show_model, response_model=ModelCard),
]
