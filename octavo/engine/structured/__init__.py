"""Structured output: grammars compiled out of the step, and the masks of each step. Back ends by name."""

from octavo.base.registry import Registry
from octavo.engine.structured.interface import Backend

BACKENDS: Registry[type[Backend]] = Registry(
    "grammar back end", {"guidance": "octavo.engine.structured.guidance:GuidanceBackend"}
)
