"""Names to objects, loaded on first use.

A registry holds strings ("package.module:attribute"), so that listing a hundred models imports none. Other
packages add entries by an entry point of the group `octavo.plugins`: a function without arguments that calls
`register` on the registries it extends. Entry points of a registry's own group are entries themselves.
"""

from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from octavo.base import env
from octavo.base.errors import ConfigError

T = TypeVar("T")


def load_object(target: str) -> Any:
    """Import "package.module:attribute" and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def load_named(target: str, purpose: str) -> Any:
    """`load_object` for a name that a user gave as `purpose`. Raises ConfigError."""
    try:
        return load_object(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{purpose}: {target!r} cannot be loaded ({error}). Name a class that every process of the "
            "engine can import: package.module:Class."
        ) from error


class Registry(Generic[T]):
    """One family of interchangeable things, by name."""

    def __init__(self, family: str, entries: dict[str, str], group: str = "") -> None:
        """group: of entry points by which installed packages add entries that octavo itself has not"""
        self.family = family
        self._targets = dict(entries)
        self._group = group

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self._installed

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._installed | self._targets)

    def register(self, name: str, target: str) -> None:
        """Add or replace the entry `name`; `target` is "package.module:attribute"."""
        self._targets[name] = target

    def load(self, name: str) -> T:
        """Import and return the entry. Raises ConfigError with the known names."""
        if name not in self:
            raise ConfigError(f"Unknown {self.family} {name!r}. Known: {', '.join(self.names())}.")
        if name in self._targets:
            return cast("T", load_object(self._targets[name]))
        return cast("T", load_named(self._installed[name], f"{self.family} {name!r}"))

    @cached_property
    def _installed(self) -> dict[str, str]:
        if not self._group:
            return {}
        from importlib.metadata import (
            entry_points,
        )  # takes as long to import as the rest of octavo's beginning

        return {entry.name: entry.value for entry in entry_points(group=self._group)}


def load_plugins() -> None:
    """Run the installed plug-ins, all or those that the environment names; by each process at its start."""
    from importlib.metadata import entry_points  # takes as long to import as the rest of octavo's beginning

    wanted = env.plugins()
    for entry in entry_points(group="octavo.plugins"):
        if wanted is None or entry.name in wanted:
            entry.load()()
