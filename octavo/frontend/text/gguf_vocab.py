"""The tokenizer of a GGUF file, built straight from its metadata.

Called by `text/loader`. Three kinds of vocabulary (`tokenizer.ggml.model`): "gpt2" is byte-level BPE whose
rule for cutting text into words is named by `tokenizer.ggml.pre`; "llama" is SentencePiece's BPE, which knows
a score per token instead of merges, spells spaces as "▁" and others as bytes; "bert" is WordPiece,
whose words begin with "▁". Keys and token types:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the names of the cutting rules are llama.cpp's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.base.errors import BadCheckpoint, OctavoError, Unsupported
from octavo.frontend.text import tokenizer
from octavo.frontend.text.tokenizer import SpecialTokens

_CONTROL, _USER_DEFINED = 3, 4
_META_SPACE = "▁"
_IN_BRACKETS = re.compile(r"\[.+\]")
"""Names of BERT's special tokens, and of those it never used."""
Pairs = list[tuple[str, str]]


class _Pre(NamedTuple):
    """How a byte-level vocabulary cuts text into words before it merges bytes."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token is taken whole."""
    add_bos: bool = False


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CASELESS_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORDS_TAIL}"
_QWEN2_WORDS = rf"{_CASELESS_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORDS_TAIL}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PATH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CASELESS_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CASELESS_ENDINGS}?|\p{{N}}{{1,3}}|{_PATH_TAIL}"
)
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}|{_PATH_TAIL}"
)

_GPT2 = _Pre((GPT2_WORDS,))
_SINGLE_DIGITS = _Pre((r"\p{N}", GPT2_WORDS))
_LLAMA3 = _Pre((_LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre((_QWEN2_WORDS,))
_GPT4O = _Pre((_GPT4O_WORDS,))
_TEKKEN = _Pre((_TEKKEN_WORDS,), ignore_merges=True, add_bos=True)

PRE = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "jina-en", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}


def tokenizer_from_metadata(metadata: Mapping[str, Any], added: Sequence[str] = ()) -> tokenizer.Tokenizer:
    """Build the tokenizer that GGUF `metadata` describes, with special tokens `added` behind its own.

    Raises Unsupported for an unknown kind of vocabulary, BadCheckpoint for an inconsistent one.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "bert"):
        raise Unsupported(
            f"GGUF tokenizer {kind!r} is not supported (gpt2, llama, bert are); set `tokenizer` to a folder."
        )
    tokens, types = _vocabulary(metadata)
    try:
        if kind == "bert":
            return tokenizer.Tokenizer(*_wordpiece(tokens, types))
        if kind == "gpt2":
            backend, add_bos = _byte_level(metadata, tokens, types)
        else:
            backend, add_bos = _sentencepiece(metadata, tokens, types), True
        special = _special_tokens(metadata, len(tokens))
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
        adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
        backend.add_special_tokens([AddedToken(token, special=True) for token in added])
        set_ends(backend, special.bos if adds_bos else None, special.eos if adds_eos else None)
    except OctavoError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for a bad vocabulary
        raise BadCheckpoint(f"The GGUF file's tokenizer cannot be built: {error}") from error
    return tokenizer.Tokenizer(backend, special)


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise BadCheckpoint("The GGUF metadata holds no list tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise BadCheckpoint(f"The GGUF metadata has {len(tokens)} tokens, but {len(types)} token types")
    return tokens, types


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE:
        known = ", ".join(sorted(PRE))
        raise Unsupported(f"GGUF pre-tokenizer {name!r} is not supported. Supported: {known}.")
    pre = PRE[name]
    merges = [_pair(line) for line in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_whole_tokens(backend, tokens, types)
    return backend, pre.add_bos


def _pair(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    # Runs of spaces are stored as they are, but the normalizer writes "▁" before anything is looked up.
    spelled = [_META_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    merges = [_pair(line) for line in metadata.get("tokenizer.ggml.merges", ())]
    if not merges:
        merges = derive_merges(_merge_order(metadata, spelled, types))
    unk = metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        {token: i for i, token in enumerate(spelled)},
        merges,
        unk_token=None if unk is None else spelled[unk],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", _META_SPACE)]
    undo: list[Any] = [decoders.Replace(_META_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_META_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    _add_whole_tokens(backend, spelled, types)
    return backend


def _wordpiece(tokens: list[str], types: list[int]) -> tuple[Tokenizer, SpecialTokens]:
    """BERT's, in lower case as llama.cpp reads it, between the tokens that begin and end a text."""
    names = [
        token.removeprefix(_META_SPACE)
        if kind == _CONTROL or token.startswith(_META_SPACE) or _IN_BRACKETS.fullmatch(token)
        else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]
    vocab = {name: i for i, name in enumerate(names)}
    roles = {name: vocab.get(f"[{name}]".upper()) for name in ("cls", "sep", "unk", "pad")}
    special = SpecialTokens(bos=roles["cls"], eos=roles["sep"], unk=roles["unk"], pad=roles["pad"])
    if special.bos is None or special.eos is None:
        raise BadCheckpoint("The GGUF file's vocabulary lacks [CLS] or [SEP]")
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", special.eos), ("[CLS]", special.bos))
    _add_whole_tokens(backend, names, types)
    return backend, special


def _merge_order(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[str]:
    """Tokens, the ones to be formed first in front: user-defined ones as they stand, the others by score."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BadCheckpoint("The GGUF metadata has neither merges nor a score for each token")
    learned = np.array(types) != _USER_DEFINED
    return [tokens[i] for i in np.lexsort((-np.array(scores), learned))]


def derive_merges(tokens: Sequence[str]) -> Pairs:
    """All pairs of tokens that join to a token, in the order of what they make; then longer left parts first.

    A token of n characters has n - 1 cuts, and both sides must be tokens: two million string look-ups for a
    vocabulary of 262,144. Here a polynomial hash modulo 2**64 of every substring comes from prefix sums
    (Karp & Rabin 1987) and numpy compares them all at once. A chance collision would add a pair that makes no
    token, which the model refuses by name.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    hashes = _SubstringHash("".join(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    whole = hashes(starts, ends)
    by_hash = np.argsort(whole)
    owner = np.repeat(np.arange(len(tokens)), lengths)
    # each token's cuts from its end down to its second character
    cuts = (starts + ends)[owner] - np.arange(ends[-1])
    inner = cuts < ends[owner]
    cuts, owner = cuts[inner], owner[inner]
    left, right = hashes(starts[owner], cuts), hashes(cuts, ends[owner])
    likely = np.zeros(
        1 << 24, bool
    )  # a coarse set by 24 bits of the hash: only what may be there is searched
    likely[whole >> np.uint64(40)] = True
    maybe = likely[left >> np.uint64(40)] & likely[right >> np.uint64(40)]
    left, right = left[maybe], right[maybe]
    sorted_hashes, last = whole[by_hash], len(tokens) - 1
    at_left = np.minimum(np.searchsorted(sorted_hashes, left), last)
    at_right = np.minimum(np.searchsorted(sorted_hashes, right), last)
    found = (sorted_hashes[at_left] == left) & (sorted_hashes[at_right] == right)
    lefts, rights = by_hash[at_left[found]].tolist(), by_hash[at_right[found]].tolist()
    return list(zip(map(tokens.__getitem__, lefts), map(tokens.__getitem__, rights), strict=True))


class _SubstringHash:
    """Hashes of any substrings of `text`: call with arrays of starts and ends."""

    _BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64

    def __init__(self, text: str) -> None:
        chars = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64) + np.uint64(1)
        powers = np.cumprod(np.full(len(chars), self._BASE, np.uint64))
        self._inverse = np.cumprod(np.full(len(chars) + 1, pow(self._BASE, -1, 1 << 64), np.uint64))
        self._sums = np.zeros(len(chars) + 1, np.uint64)
        np.cumsum(chars * powers, out=self._sums[1:])

    def __call__(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[n] uint64; equal strings give equal hashes wherever they stand."""
        hashes: np.ndarray = (self._sums[ends] - self._sums[starts]) * self._inverse[starts]
        return hashes


def _add_whole_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in a text before anything is cut or merged."""
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL or (kind == _USER_DEFINED and token.strip(_META_SPACE))
        ]
    )


def _special_tokens(metadata: Mapping[str, Any], num_tokens: int) -> SpecialTokens:
    def role(name: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < num_tokens):
            raise BadCheckpoint(
                f"tokenizer.ggml.{name}_token_id is {token_id!r}; the file has {num_tokens} tokens"
            )
        return token_id

    template = metadata.get("tokenizer.chat_template")
    ends = {role(name) for name in ("eot", "eom")}
    return SpecialTokens(
        bos=role("bos"),
        eos=role("eos"),
        pad=role("padding"),
        unk=role("unknown"),
        ends=frozenset(token_id for token_id in ends if token_id is not None),
        chat_templates={"default": template} if isinstance(template, str) else {},
    )


def set_ends(backend: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make `backend` begin every text with `bos` and end it with `eos` (None: with nothing)."""
    names = {i: backend.id_to_token(i) for i in (bos, eos) if i is not None}
    single = [name for name in (names.get(bos), "$A", names.get(eos)) if name is not None]  # type: ignore[arg-type]
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, i) for i, name in names.items()]
    )
