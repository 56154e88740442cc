"""Other weights of the same architecture, loaded beside those in use until all ranks have theirs.

The worker's commands `stage_weights`, `use_staged_weights` and `drop_staged_weights` are the two phases of an
update: a rank that cannot load refuses the first, and nothing has changed anywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.checkpoint import read_checkpoint
from octavo.config.engine import EngineConfig
from octavo.runtime.models.interface import Model
from octavo.runtime.speculative.drafter import Drafter

Load = Callable[[EngineConfig], tuple[Model, Drafter | None]]
_COMPARED = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "quantization_config")


class Weights(NamedTuple):
    """A model that is loaded, and the config that names its files. path: of these weights; "" = in no file"""

    config: EngineConfig
    model: Model
    drafter: Drafter | None
    path: str


class StagedWeights:
    """The weights that wait on one rank, if there are some."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._next: Weights | None = None

    def stage(self, config: EngineConfig, path: str) -> None:
        """Load the weights at `path`; `config` describes the model. Raises BadCheckpoint, Unsupported."""
        self._next = None
        if config.model.load_format == "dummy":
            raise Unsupported("load_format=dummy reads no weights: there are no others to load.")
        found, known = read_checkpoint(Path(path)), config.checkpoint
        for name in _COMPARED:
            new, old = found.text_config.get(name), known.text_config.get(name)
            if new != old:
                raise BadCheckpoint(f"{path}: {name} is {new!r:.100}, the model's is {old!r:.100}.")
        if found.format != known.format:
            raise BadCheckpoint(
                f"{path} holds {found.format} weights, the model was read from {known.format}."
            )
        self.put(config, self._load(replace(config, checkpoint=replace(known, path=found.path))), found.path)

    def put(self, config: EngineConfig, loaded: tuple[Model, Drafter | None], path: str) -> None:
        """Let weights wait that are loaded. path: of their files; "" = there are none"""
        if path:
            config = replace(config, checkpoint=replace(config.checkpoint, path=path))
        self._next = Weights(config, *loaded, path)

    def take(self) -> Weights:
        """Return what waits."""
        weights, self._next = self._next, None
        if weights is None:
            raise Unsupported("No weights have been loaded for an update.")
        return weights

    def drop(self) -> None:
        """Forget what waits."""
        self._next = None
