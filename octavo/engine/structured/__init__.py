"""Structured output: grammars compiled out of the step, and the masks of each step. Back ends by name."""

from typing import Any

from octavo.base.registry import Registry
from octavo.engine.structured.interface import Backend

BACKENDS: Registry[type[Backend[Any]]] = Registry(
    "grammar back end", {"guidance": "octavo.engine.structured.guidance:GuidanceBackend"}
)
