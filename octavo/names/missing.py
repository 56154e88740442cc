"""Names whose feature octavo has not: they can be imported and stand in annotations, and say so when used."""

from typing import Any, NoReturn

from octavo.base.errors import Unsupported


class _Missing(type):
    """Refuses what one does with a class or function: calls, attributes, derived classes."""

    reason: str

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> "_Missing":
        for base in bases:
            if isinstance(base, _Missing):
                base()
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *args: object, **options: object) -> NoReturn:
        raise Unsupported(f"{cls.__name__}: {cls.reason}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


def name(name: str, reason: str) -> type:
    """A stand-in that raises Unsupported with the reason."""
    return _Missing(name, (), {"reason": reason, "__module__": "octavo", "__doc__": reason})
