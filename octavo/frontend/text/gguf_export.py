"""A folder's tokenizer as the metadata of a GGUF file, for `octavo quantize`; `gguf_vocab` reads it back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.base.errors import Unsupported
from octavo.frontend.text.gguf_vocab import GPT2_WORDS, PRE
from octavo.frontend.text.loader import load_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def vocabulary_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the keys `tokenizer.*`. vocab_size: rows of the embedding. Raises Unsupported, BadCheckpoint."""
    tokenizer = load_tokenizer(folder)
    stored = json.loads(tokenizer.to_json())
    model, ids = stored["model"], tokenizer.get_vocab()
    if model["type"] != "BPE":
        raise Unsupported(f"A tokenizer of type {model['type']} is not written to GGUF files; BPE is.")
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, i in ids.items():
        if i >= vocab_size:
            raise Unsupported(f"The tokenizer has the id {i}, the embedding {vocab_size} rows.")
        is_byte = model.get("byte_fallback") and token.startswith("<0x") and len(token) == 6
        tokens[i], types[i] = token, _BYTE if is_byte else _NORMAL
    for added in stored.get("added_tokens") or ():
        types[added["id"]] = _CONTROL if added.get("special") else _USER_DEFINED
    made: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if "ByteLevel" in json.dumps([stored.get("pre_tokenizer"), stored.get("decoder")]):
        made["tokenizer.ggml.model"] = "gpt2"
        made["tokenizer.ggml.pre"] = _cutting_rule(stored.get("pre_tokenizer") or {})
        made["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    else:
        made["tokenizer.ggml.model"] = "llama"
        made["tokenizer.ggml.scores"] = _scores(tokens, merges)
        steps = json.dumps([stored.get("normalizer"), stored.get("pre_tokenizer")])
        adds = ('"Prepend"', '"prepend_scheme": "first"', '"prepend_scheme": "always"')
        made["tokenizer.ggml.add_space_prefix"] = any(step in steps for step in adds)
    for theirs, ours in _ROLES.items():
        if (token_id := getattr(tokenizer, f"{ours}_token_id")) is not None:
            made[f"tokenizer.ggml.{theirs}_token_id"] = token_id
    start = tokenizer.encode("a")
    made["tokenizer.ggml.add_bos_token"] = bool(start) and start[0] == tokenizer.bos_token_id
    if template := tokenizer.chat_template:
        made["tokenizer.chat_template"] = template
    return made


def _cutting_rule(pre: dict[str, Any]) -> str:
    """Return the name of the rule by which a text is cut into words. Raises Unsupported for one without."""
    patterns = tuple(_patterns(pre))
    for name, rule in PRE.items():
        if name != "default" and rule.patterns == patterns:
            return name
    raise Unsupported(
        "The rule by which this tokenizer cuts texts into words has no name that octavo knows in GGUF files: "
        "convert the model with llama.cpp, then let octavo quantize that file."
    )


def _patterns(pre: dict[str, Any]) -> Iterator[str]:
    kind = pre.get("type")
    if kind == "Sequence":
        for step in pre["pretokenizers"]:
            yield from _patterns(step)
    elif kind == "Split":
        yield str(pre["pattern"].get("Regex"))
    elif kind == "Digits" and pre.get("individual_digits"):
        yield r"\p{N}"
    elif kind == "ByteLevel":
        if pre.get("use_regex", True):
            yield GPT2_WORDS
    else:
        yield f"unknown: {kind}"


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Return scores by which the pairs that were learned first are joined first."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges) + i)) for i, token in enumerate(tokens)]
