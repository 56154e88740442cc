"""`MediaReader`: from the items that come with a prompt to what the engine gets of them.

Called by the input processor, on threads: it may fetch files and wait for the processes that decode them.
Keeps what is prepared by content, bounded in bytes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.base.errors import ConfigError, RequestError
from octavo.base.lru import LRU
from octavo.config.checkpoint import read_json
from octavo.config.engine import EngineConfig
from octavo.frontend.media.child import Question, pack
from octavo.frontend.media.door import MediaDoor
from octavo.frontend.media.inputs import MediaInputs, MediaURL, is_tensor
from octavo.frontend.media.objects import to_image
from octavo.frontend.media.pool import PreparationPool
from octavo.frontend.media.processors.interface import ImageProcessor
from octavo.frontend.media.registry import PROCESSORS
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.media import EMBEDS, Features, MediaItem

_SETTINGS = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item without its place. tokens: what stands for it in a prompt"""

    key: bytes
    tokens: list[int]
    features: dict[str, Features]

    @property
    def num_bytes(self) -> int:
        """Return the size of what it holds."""
        return sum(features.num_bytes for features in self.features.values()) + 8 * len(self.tokens)


class MediaReader:
    """Reads items for one model. Thread-safe."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        """Raises BadCheckpoint, ConfigError."""
        self._config = media = config.media
        path = Path(config.checkpoint.path) / _SETTINGS
        stored = read_json(path) if path.is_file() else {}
        self._architecture = config.checkpoint.media_architecture
        kind, self._tokenizer = PROCESSORS.load(self._architecture), tokenizer
        self.processor: ImageProcessor = kind(
            config.checkpoint.config, stored | kind.OVERRIDES | media.mm_processor_kwargs, self._encode
        )
        if unknown := sorted(set(media.mm_processor_kwargs) - kind.OPTIONS):
            raise ConfigError(f"Unknown mm_processor_kwargs {', '.join(unknown)}. Known: {_names(kind)}.")
        self._embedding_size = config.checkpoint.embedding_size
        scheduler = config.scheduler
        self._longest = min(scheduler.max_chunk, scheduler.max_num_batched_tokens - scheduler.max_num_seqs)
        self._door = MediaDoor(media)
        self._pool = PreparationPool(media.media_processes)
        self._cache: LRU[bytes, Prepared] = LRU(int(media.mm_processor_cache_gb * 2**30))
        self._lock = threading.Lock()
        self.on_lookup: Callable[..., None] = lambda *, is_known: None
        """Is told of each look into the cache."""

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("Images of this model need its tokenizer: leave skip_tokenizer_init out.")
        return self._tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def clear(self) -> None:
        """Forget what was prepared."""
        with self._lock:
            self._cache.clear()

    def read(self, inputs: MediaInputs, salt: str) -> list[Prepared]:
        """Prepare all items of a prompt. salt: of the cache; names of other salts are other names.

        Raises RequestError.
        """
        self._check_counts(inputs)
        kwargs = self._checked_kwargs(inputs.kwargs)
        prepared = []
        for modality, items in inputs.items.items():
            names = inputs.uuids.get(modality) or [None] * len(items)
            for item, name in zip(items, names, strict=True):
                prepared.append(self._read(item, name, kwargs, salt))
        return prepared

    def place(self, ids: list[int], prepared: Sequence[Prepared]) -> tuple[list[int], list[MediaItem]]:
        """Put what stands for the items in the place of their markers.

        Raises RequestError if they do not match.
        """
        processor, placed, items, waiting = self.processor, [], [], iter(prepared)
        num_markers = ids.count(processor.marker_id)
        if num_markers != len(prepared):
            raise RequestError(
                f"The prompt has {num_markers} image placeholder(s), but {len(prepared)} image(s) are given. "
                "Each image needs one.",
                "multi_modal_data",
            )
        for token in ids:
            if token != processor.marker_id:
                placed.append(token)
                continue
            item = next(waiting)
            if processor.sees_itself and len(item.tokens) > self._longest:
                raise RequestError(
                    f"An image takes {len(item.tokens)} tokens, which one step computes together: at most "
                    f"{self._longest} with these max_num_batched_tokens and max_num_seqs.",
                    "multi_modal_data",
                )
            items.append(self._item(item, len(placed)))
            placed += item.tokens
        return placed, items

    def _item(self, item: Prepared, start: int) -> MediaItem:
        return MediaItem(
            "image",
            start,
            len(item.tokens),
            self.processor.placeholder_id,
            item.key,
            item.features,
            self.processor.sees_itself,
        )

    def _check_counts(self, inputs: MediaInputs) -> None:
        for modality, items in inputs.items.items():
            limit = self._config.limit_mm_per_prompt.get(modality)
            most = limit.get("count") if isinstance(limit, Mapping) else limit
            if most is not None and len(items) > most:
                raise RequestError(
                    f"At most {most} {modality}(s) may be provided in one prompt.", "multi_modal_data"
                )

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if unknown := sorted(set(kwargs) - self.processor.OPTIONS):
            raise RequestError(
                f"Unknown mm_processor_kwargs {', '.join(unknown)}. Known: {_names(type(self.processor))}.",
                "mm_processor_kwargs",
            )
        return kwargs

    def _read(self, item: Any, name: str | None, kwargs: Mapping[str, Any], salt: str) -> Prepared:
        if isinstance(item, Prepared):
            return item
        if is_tensor(item) and item.ndim == 2:
            return self._read_embeds(item)
        settings = {**self.processor.settings, **kwargs}
        made_by = msgspec.json.encode([self._architecture, settings], order="deterministic")
        if name is not None:
            key = _digest([b"uuid", made_by, salt.encode("utf-8", "surrogatepass"), name.encode()])
            if (known := self._find(key)) is not None:
                return known
            if item is None:
                raise RequestError(
                    f"The image named {name!r} is not in the cache (any more): send its content.",
                    "multi_modal_uuids",
                )
            return self._keep(self._prepare(item, key, settings))
        if item is None:
            raise RequestError("An image must be given, or named by a uuid.", "multi_modal_data")
        content = self._door.fetch(item.url) if isinstance(item, MediaURL) else item
        key = _digest([b"content", made_by, *_parts(content)])
        return self._find(key) or self._keep(self._prepare(content, key, settings))

    def _find(self, key: bytes) -> Prepared | None:
        with self._lock:
            found = self._cache.get(key)
        self.on_lookup(is_known=found is not None)
        return found

    def _keep(self, prepared: Prepared) -> Prepared:
        with self._lock:
            self._cache.put(prepared.key, prepared, prepared.num_bytes)
        return prepared

    def _prepare(self, item: Any, key: bytes, settings: Mapping[str, Any]) -> Prepared:
        """Prepare here what is an image already, and in another process what is a file."""
        content = self._door.fetch(item.url) if isinstance(item, MediaURL) else item
        if isinstance(content, bytes):
            media = self._config
            question = Question(
                self._architecture,
                dict(settings),
                content,
                media.max_image_pixels,
                media.media_decode_timeout,
            )
            features = self._pool.ask(question).features
        else:
            try:
                features = pack(self.processor.prepare(to_image(content), settings))
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                text = f"The image cannot be prepared with these mm_processor_kwargs: {error}"
                raise RequestError(text, "mm_processor_kwargs") from None
        arrays = {n: np.frombuffer(f.data, f.dtype).reshape(f.shape) for n, f in features.items()}
        return Prepared(key, self.processor.tokens(arrays), features)

    def _read_embeds(self, tensor: Any) -> Prepared:
        """Take outputs of the encoder, [tokens, embedding_size]."""
        if not self._config.enable_mm_embeds:
            raise RequestError(
                "You must set `--enable-mm-embeds` (enable_mm_embeds=True) to input `image_embeds`.",
                "multi_modal_data",
            )
        if tensor.shape[1] != self._embedding_size or not tensor.is_floating_point():
            raise RequestError(
                f"image_embeds must be floats of shape (num_tokens, {self._embedding_size}) for this model, "
                f"got {tuple(tensor.shape)}.",
                "multi_modal_data",
            )
        array = np.ascontiguousarray(tensor.detach().cpu().float().numpy())
        if not np.isfinite(array).all():
            raise RequestError("image_embeds must hold finite numbers.", "multi_modal_data")
        key = _digest([b"embeds", array.tobytes()])
        features = {EMBEDS: Features("float32", list(array.shape), array.tobytes())}
        return Prepared(key, self.processor.tokens_of_embeds(len(array)), features)


def _names(kind: type[ImageProcessor]) -> str:
    return ", ".join(sorted(kind.OPTIONS))


def _parts(content: Any) -> Iterator[bytes]:
    """Yield what makes up an image's identity."""
    if isinstance(content, bytes | bytearray):
        yield b"file"
        yield bytes(content)
        return
    if hasattr(content, "tobytes") and hasattr(content, "mode"):  # Pillow's
        yield f"{content.mode} {content.size}".encode()
        yield content.tobytes()
        yield repr(content.getpalette() if content.mode == "P" else None).encode()
        return
    array = np.asarray(content)
    yield f"{array.dtype.str} {array.shape}".encode()
    yield np.ascontiguousarray(array).tobytes()


def _digest(parts: Sequence[bytes]) -> bytes:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
