"""Gives a model what makes it a pooling model, and reads the weights that lie beside its own."""

from collections.abc import Iterator
from pathlib import Path

from octavo.base.errors import BadCheckpoint
from octavo.config.engine import EngineConfig
from octavo.config.pooling import PoolingConfig
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.pooler import Pooler
from octavo.runtime.loader.piece import Piece
from octavo.runtime.loader.safetensors import read_file, read_tensors
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import to


def add_pooler(model: Family, config: PoolingConfig, build: BuildContext, size: int) -> None:
    """Add the layers behind pooling to a new model, and where its checkpoint has them. size: of a state"""
    names = model.CLASSIFIER
    model.pooler = Pooler(config, build.at("pooler"), size, names)
    out = names.token_out if config.tasks[0] == "token_classify" else ""
    places = {"dense": names.dense, "norm": names.norm, "out": out or names.out}
    present = dict(model.pooler.named_children())
    rules = {stem: to(f"pooler.{name}") for name, stem in places.items() if present.get(name) is not None}
    for projection in config.projections:
        rules[projection.name] = to(f"pooler.projections.{projection.task}.linear")
    if config.sparse:
        rules |= model.MASKED_HEAD
    model.WEIGHTS = model.WEIGHTS.for_pooling(rules, has_head=config.has_head)
    model.GGUF_WEIGHTS = model.GGUF_WEIGHTS.for_pooling({}, has_head=config.has_head)


def read_stages(config: EngineConfig) -> Iterator[Piece]:
    """Yield the weights of a Sentence-BERT chain and of layers with own files. Raises BadCheckpoint."""
    assert config.pooling is not None
    if config.model.load_format == "dummy":
        return
    for projection in config.pooling.projections:
        file = Path(config.checkpoint.path, f"{projection.name}.safetensors")
        for origin, name, tensor in read_file(file) if file.is_file() else ():
            yield Piece(origin, f"pooler.projections.{projection.task}.linear.{name}", "", tensor)
    for index, stage in enumerate(config.pooling.stages):
        if not stage.path:
            continue
        tensors = list(read_tensors(Path(stage.path)))
        if not tensors:
            raise BadCheckpoint(f"{stage.path} holds no *.safetensors: pickled weights are never loaded.")
        for origin, name, tensor in tensors:
            yield Piece(origin, f"pooler.stages.{index}.{name}", "", tensor)
