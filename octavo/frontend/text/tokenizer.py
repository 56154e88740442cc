"""`Tokenizer`: text to token ids and back; the one object of the front that knows a vocabulary.

Made by `text/loader` from a GGUF file or a Hugging Face folder, used by input and output processor and given
to users. It never changes after construction, so any number of threads may share it. Encoding is the
`tokenizers` library's; decoding is ours and defined by bytes: every token stands for a byte string that does
not depend on its neighbours (except at the start of a text), and a text is those bytes read as UTF-8. Thus
whole and incremental decoding (`text/detokenizer`) agree by construction, at any split.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import tokenizers

from octavo.base import faults
from octavo.base.errors import RequestError
from octavo.frontend.text.chat_template import ChatTemplate, compiled_template

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2), as character → byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF_CHAR = byte_alphabet()


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids with a role of their own, and the template that turns a conversation into a prompt."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    ends: frozenset[int] = frozenset()
    """Ids that end a text besides `eos` (end of turn …)."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; "default" and "tool_use" have a meaning."""


T = TypeVar("T")


class _ById(dict[int, T]):
    """Something of each token by its id, made when it is first asked for."""

    def __init__(self, make: Callable[[int], T], vocab_size: int) -> None:
        super().__init__()
        self._make = make
        self._vocab_size = vocab_size

    def __missing__(self, token_id: int) -> T:
        made = self._make(token_id)
        if 0 <= token_id < self._vocab_size:  # of others there is no end
            self[token_id] = made
        return made


class Encoding(dict[str, Any]):
    """What a call of the tokenizer answers: a dict whose two values are attributes too."""

    def __init__(self, input_ids: Any, attention_mask: Any) -> None:
        super().__init__(input_ids=input_ids, attention_mask=attention_mask)
        self.input_ids, self.attention_mask = input_ids, attention_mask


class Tokenizer:
    """A vocabulary with its rules. Immutable and thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special = special or SpecialTokens()
        self.bos_token_id, self.bos_token = special.bos, self._name(special.bos)
        self.eos_token_id, self.eos_token = special.eos, self._name(special.eos)
        self.pad_token_id, self.pad_token = special.pad, self._name(special.pad)
        self.unk_token_id, self.unk_token = special.unk, self._name(special.unk)
        self.end_ids = special.ends if special.eos is None else special.ends | {special.eos}
        """Every id that ends a text."""
        self._templates = {name: ChatTemplate(text) for name, text in special.chat_templates.items()}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out of a text."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        decoder = repr(backend.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._byte_fallback = "ByteFallback" in decoder
        self.pieces = _ById(self.token_bytes, self.vocab_size)
        """By id: what it adds to a text that has begun."""
        self.token_texts = _ById(partial(self.text_after, b""), self.vocab_size)
        """By id: the whole characters of its piece."""

    def __len__(self) -> int:
        return self.vocab_size

    def parts(self) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
        """Return what it was made of."""
        return self._backend, self._special

    # Ids and roles

    @property
    def all_special_ids(self) -> list[int]:
        """`special_ids` in order."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Their names."""
        return list(self.special_tokens)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Their ids, by text."""
        return {text: i for i in self.all_special_ids if (text := self._backend.id_to_token(i)) is not None}

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def to_json(self) -> str:
        """All of it, as tokenizer.json has it."""
        return str(self._backend.to_str())

    def get_vocab(self) -> dict[str, int]:
        """Name → id, added tokens included."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's names of these ids, "" for an id it does not have."""
        return [self._backend.id_to_token(i) or "" for i in ids]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int] | None:
        """The id of one name, or a list for several; an unknown name gives `unk_token_id`."""
        if isinstance(tokens, str):
            found: int | None = self._backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]  # type: ignore[misc]  # one name, one id

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The vocabulary's names of the tokens of `text`."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts BOS/EOS where the model was trained with them.

        Raises RequestError for a text that is not Unicode (lone surrogates).
        """
        # As a batch, because only these let other threads run meanwhile: a long text takes seconds.
        [ids] = self.encode_all([text], add_special_tokens)
        return ids

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts, on all cores. Raises RequestError if one of them is not Unicode."""
        faults.hit("tokenize")
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:  # all that the library says of a string it cannot read
            raise RequestError("The text is not Unicode: it holds a lone surrogate.", "prompt") from None
        return [encoding.ids for encoding in encodings]

    def encode_cut(self, text: str, length: int, side: str, add_special_tokens: bool = True) -> list[int]:
        """Return at most `length` token ids: the text is cut at `side`, and the special tokens stay."""
        encoding = self._parts([text])[0]
        room = length - self._num_special(is_pair=False) if add_special_tokens else length
        encoding.truncate(max(0, room), direction=side)
        ids: list[int] = self._backend.post_process(encoding, None, add_special_tokens).ids
        return ids

    def encode_pair(self, first: str, second: str, length: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of two texts, and where the second one begins if the model marks it, else 0.

        length: most tokens; the longer text is cut first
        """
        a, b = self._parts([first, second])
        if length is not None:
            rooms = _rooms(len(a), len(b), max(0, length - self._num_special(is_pair=True)))
            for encoding, room in zip((a, b), rooms, strict=True):
                encoding.truncate(room)
        joined = self._backend.post_process(a, b, True)
        return joined.ids, joined.type_ids.index(1) if 1 in joined.type_ids else 0

    def shortened(self, text: str, length: int | None) -> str:
        """Return the beginning of `text` that its first `length` tokens spell; None = all."""
        ends = [end for _, end in self._parts([text])[0].offsets[:length]] if length else []
        return text[: max(ends)] if len(ends) == length else text

    def _parts(self, texts: list[str]) -> list[tokenizers.Encoding]:
        try:
            return list(self._backend.encode_batch(texts, add_special_tokens=False))
        except TypeError:
            raise RequestError("The text is not Unicode: it holds a lone surrogate.", "prompt") from None

    def _num_special(self, *, is_pair: bool) -> int:
        return int(self._backend.num_special_tokens_to_add(is_pair))

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        *,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """Return `input_ids` and `attention_mask` of one text or several, as transformers' tokenizers do.

        truncation: cut texts behind max_length tokens; padding: fill up to the longest, or to max_length
        ("max_length"), with the pad token at the end
        """
        texts = [text] if isinstance(text, str) else text
        if truncation and max_length is not None:
            ids = [self.encode_cut(one, max_length, "right", add_special_tokens) for one in texts]
        else:
            ids = self.encode_all(texts, add_special_tokens)
        width = max_length if padding == "max_length" else max(map(len, ids), default=0) if padding else None
        gaps = [max(0, (width or 0) - len(one)) for one in ids]
        mask: Any = [[1] * len(one) + [0] * gap for one, gap in zip(ids, gaps, strict=True)]
        rows: Any = [one + [self.pad_token_id or 0] * gap for one, gap in zip(ids, gaps, strict=True)]
        return Encoding(rows[0], mask[0]) if isinstance(text, str) else Encoding(rows, mask)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        **options: Any,
    ) -> str | list[int]:
        """The prompt of a conversation, as ids or (tokenize=False) as text; `options` of ChatTemplate.render.

        Raises RequestError when there is no template, or when it refuses the conversation.
        """
        template = (
            compiled_template(chat_template) if chat_template else self.chat_template_for(tools=bool(tools))
        )
        names = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        names |= {"pad_token": self.pad_token or "", "unk_token": self.unk_token or ""}
        text = template.render(conversation, tools=tools, special_tokens=names, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, if the model has one."""
        template = self._templates.get("default")
        return template.source if template else None

    def chat_template_for(self, *, tools: bool = False) -> ChatTemplate:
        """The model's template, with or without tools. Raises RequestError when it has none."""
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise RequestError(
                "The model brings no chat template: pass chat_template, or use generate with a plain prompt.",
                "messages",
            )
        return template

    # Ids to text

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """What `token_id` adds to a text; `first`: it begins the text (some vocabularies drop a space)."""
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
            except KeyError:  # an added token, spelled plainly
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if first:
            return self._spell([token]).encode()
        return self._spell([_ANCHOR, token]).removeprefix(_ANCHOR).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of `token_id` on its own; bytes that are no character become U+FFFD."""
        return self.pieces[token_id].decode("utf-8", "replace")

    def text_after(self, unfinished: bytes, token_id: int) -> str:
        """Return the text that `token_id` completes after `unfinished`, the beginning of a character."""
        return utf_8_decode(unfinished + self.pieces[token_id], "replace", False)[0]

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary add nothing."""
        ids = [ids] if isinstance(ids, int) else ids
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        pieces = (self.token_bytes(token_id, first=n == 0) for n, token_id in enumerate(kept))
        return b"".join(pieces).decode("utf-8", "replace")

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = True) -> list[str]:
        """`decode` of several."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def _spell(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(tokens)
        return text

    def _name(self, token_id: int | None) -> str | None:
        if token_id is None:
            return None
        name: str | None = self._backend.id_to_token(token_id)
        return name


def _rooms(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts stay, so that both fit: the longer one is cut first."""
    short, long = sorted((first, second))
    if first + second > room:
        short = min(short, room // 2)
        long = room - short
    return (short, long) if first <= second else (long, short)
