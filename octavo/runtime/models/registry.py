"""`ModelRegistry` is vLLM's name for the table of model architectures.

For plug-ins: every process of an engine runs the functions of the entry point group `octavo.plugins` at its
start, and what they register here it can load. What a script registers is known to its own process only.
"""

from octavo.runtime.models.interface import MODELS, Family


class ModelRegistry:
    """The table names the class that computes an architecture, by the name that a config gives it."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Return the names that octavo has code of its own for; most others run by transformers' code."""
        return MODELS.names()

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type[Family]) -> None:
        """Add or replace an architecture; `model_cls`: a Family, or where it is, "package.module:Class"."""
        target = (
            model_cls if isinstance(model_cls, str) else f"{model_cls.__module__}:{model_cls.__qualname__}"
        )
        MODELS.register(model_arch, target)
