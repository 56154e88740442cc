"""`Engines`: the engines of one server, by the names of their models. The only reader of what is served.

Made with the app, and by what answers requests without one; asked by `Caller`.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.base.errors import RequestError, UnknownModel
from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
from octavo.serving.adapters import LoRAScale, ServedAdapters


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


class Engines:
    """There is one engine so far, with adapters that have names of their own."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        self._engine = engine
        self.models = ServedModels.of(engine.config)
        self.adapters = ServedAdapters(engine, config, self.models.names)

    def of(self, model: str | None = None) -> AsyncLLM:
        """The engine of a model whose name is `resolve`d; without a name, of the first."""
        return self._engine

    def resolve(self, asked: str | None) -> str:
        """The name to answer with. Raises UnknownModel, RequestError for an adapter that cannot be read."""
        if not asked:
            return self.models.names[0]
        if asked not in self.models.names and self.adapters.find(asked) is None:
            served = ", ".join([*self.models.names, *(entry.name for entry in self.adapters.listed()[:20])])
            raise UnknownModel(f"The model {asked[:200]!r} does not exist. Served here: {served}.", "model")
        return asked

    def adapter_of(
        self, model: str, scales: Iterable[LoRAScale] | None
    ) -> LoRARequest | LoRASum | PromptAdapterRequest | None:
        """What answers under a resolved name; scales: of adapters to add up. Raises as `resolve`."""
        found = None if model in self.models.names else self.adapters.find(model)
        if scales is None:
            return None if found is None else found.request
        if found is not None:
            raise RequestError(
                f"lora is for requests to the base model, not to the adapter {model!r}.", "lora"
            )
        return self.adapters.sum_of(scales)
