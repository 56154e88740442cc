"""The headers of a request, as the middlewares ask for them: values of one name, in order."""

from starlette.types import Scope


def values(scope: Scope, name: bytes) -> list[str]:
    """All values of a header; `name` in lower case."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def value(scope: Scope, name: bytes) -> str:
    """Its only value; "" when there is none, or more than one: then nobody can say which counts."""
    found = values(scope, name)
    return found[0] if len(found) == 1 else ""
