"""Logits processors of the user's own, which the engine imports by name."""

from typing import Any

from octavo.base.errors import ConfigError

_GROUPS = ("vllm.logits_processors", "octavo.logits_processors")


def installed_processors() -> list[str]:
    """Names of the classes that installed packages bring, those for vLLM too."""
    from importlib.metadata import entry_points  # takes as long to import as the rest of octavo's beginning

    return [importable_name(entry.value) for group in _GROUPS for entry in entry_points(group=group)]


def importable_name(processor: Any) -> str:
    """The package.module:Class of a class, or of its name in either of the usual forms."""
    if isinstance(processor, type):
        if "." in processor.__qualname__:
            raise ConfigError(
                f"logits_processors: {processor.__qualname__} is defined inside a function or class. The "
                "engine imports it by name: define it at the top of a module."
            )
        return f"{processor.__module__}:{processor.__qualname__}"
    module, separator, name = str(processor).rpartition(":" if ":" in str(processor) else ".")
    if not isinstance(processor, str) or not (module and separator and name):
        raise ConfigError(
            f"logits_processors must hold classes, or names like package.module:Class, got {processor!r}."
        )
    return f"{module}:{name}"
