"""`SharedVocabulary`: which token of a draft model stands for the same text as a token of the model.

A draft model with another vocabulary has the rows of its embeddings and of its head put in the order of the
model's tokens while it is loaded. So it reads and gives the model's ids; tokens that it has not are never
guessed. Idea: token-level intersection, https://arxiv.org/abs/2502.05202
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.gguf import GGUFFile
from octavo.base.hub import locate
from octavo.config.checkpoint import read_json
from octavo.config.engine import EngineConfig
from octavo.runtime.loader.loader import READERS
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family

_SPACES = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
_BY_TOKEN = ("embed_tokens", "lm_head")
_LEAST_SHARE = 0.1
"""Of the model's tokens: a draft model with fewer would guess next to nothing."""


class SharedVocabulary:
    """Ids of the draft model by the model's ids; missing: [n] int64, tokens that it has not."""

    def __init__(self, target: EngineConfig, draft: EngineConfig) -> None:
        """Read both tokenizers. Raises BadCheckpoint for one that cannot be read, or vocabularies apart."""
        source = locate(target.model.tokenizer) if target.model.tokenizer else Path(target.checkpoint.path)
        known, wanted = _tokens(Path(draft.checkpoint.path)), _tokens(source)
        ids, size = torch.full((target.checkpoint.vocab_size,), -1), draft.checkpoint.vocab_size
        for text, token_id in wanted.items():
            if token_id < len(ids) and known.get(text, size) < size:
                ids[token_id] = known[text]
        self.missing = (ids < 0).nonzero()[:, 0]
        if len(self.missing) > (1 - _LEAST_SHARE) * len(ids):
            raise BadCheckpoint(
                f"use_heterogeneous_vocab: the draft model has {len(ids) - len(self.missing)} of the model's "
                f"{len(ids)} tokens. Use a draft model whose vocabulary has more in common."
            )
        self._ids = ids.clamp(min=0)
        config = draft.checkpoint.config | {"vocab_size": len(ids)}
        self.draft = replace(draft, checkpoint=replace(draft.checkpoint, config=config))

    def read(self, config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
        """Yield the draft model's tensors, those with a row per token in the model's order."""
        for piece in READERS.load(config.model.load_format)(config, model, arch):
            if piece.parameter.split(".")[0] not in _BY_TOKEN:
                yield piece
            elif not isinstance(piece.tensor, Tensor):
                raise Unsupported(f"use_heterogeneous_vocab: {piece.origin} is packed; use plain weights.")
            else:
                yield replace(piece, tensor=piece.tensor[self._ids])


def _tokens(path: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens by their texts."""
    if path.suffix == ".gguf":
        listed = GGUFFile(path).metadata.get("tokenizer.ggml.tokens") or []
        return {str(text).translate(_SPACES): token_id for token_id, text in enumerate(listed)}
    content = read_json(path / "tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # with scores
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {text.translate(_SPACES): token_id for text, token_id in (vocabulary | added).items()}
