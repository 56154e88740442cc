"""`Engines`: the engines of one server, by the names of their models. The only reader of what is served.

Made with the app, and by what answers requests without one; asked by `Caller`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.base.errors import UnknownModel
from octavo.config.engine import EngineConfig
from octavo.frontend.async_engine import AsyncLLM


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


class Engines:
    """There is one engine so far."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.models = ServedModels.of(engine.config)

    def of(self, model: str | None = None) -> AsyncLLM:
        """The engine of a model; without a name, of the first. Raises UnknownModel."""
        self.models.resolve(model)
        return self._engine
