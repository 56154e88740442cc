"""Finds tokens in a folder's tokenizer.json, for decisions that are made before there is a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.config.checkpoint import read_json


def find_tokens(folder: str, words: Sequence[str], *, some: bool = False) -> list[int]:
    """Return the ids of words that are tokens; some: leave out those that are none. Raises ConfigError."""
    if not words:
        return []
    file = Path(folder, "tokenizer.json")
    content = read_json(file)
    vocab = content.get("model", {}).get("vocab") or {}
    if isinstance(vocab, list):  # of a unigram model: tokens with scores
        vocab = {entry[0]: index for index, entry in enumerate(vocab)}
    vocab |= {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    if missing := [word for word in words if word not in vocab and not some]:
        raise ConfigError(f"{file} has no token {missing[0]!r:.100}.")
    return [int(vocab[word]) for word in words if word in vocab]
