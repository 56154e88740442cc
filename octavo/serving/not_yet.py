"""Routes that clients of other servers know and octavo does not have yet: 404, and what would work."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.serving.errors import HTTPError
from octavo.serving.registry import Route

_POOLING = "the model generates text; embeddings, classes and scores need another kind of model"
_LORA = "adapters are not loaded at run time: merge the adapter into the model's weights"
_MEDIA = "octavo serves text only"
_INSTEAD = {
    "/v1/embeddings": _POOLING,
    "/v2/embed": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/score": _POOLING,
    "/v1/score": _POOLING,
    "/rerank": _POOLING,
    "/v1/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/v1/audio/speech": _MEDIA,
    "/v1/audio/transcriptions": _MEDIA,
    "/v1/audio/translations": _MEDIA,
    "/v1/images/generations": _MEDIA,
}


async def refuse(request: Request) -> Response:
    """Say that there is no such route yet."""
    route = request.scope["endpoint"].path
    raise HTTPError(404, f"{route} is not there: {_INSTEAD[route]}.")


ROUTES = [Route(path, refuse, ("GET", "POST"), documented=False) for path in _INSTEAD]
