"""`MediaReader`: from the items that come with a prompt to what the engine gets of them.

Called by the input processor, on threads: it may fetch files and wait for the processes that decode them.
Keeps what is prepared by content, bounded in bytes.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.base.errors import ConfigError, RequestError
from octavo.base.lru import LRU
from octavo.config.checkpoint import read_json
from octavo.config.engine import EngineConfig
from octavo.frontend.media.audio import AudioLimits, to_waveform
from octavo.frontend.media.child import FAULTS, UNFIT, Question, pack
from octavo.frontend.media.door import MediaDoor
from octavo.frontend.media.identity import Identities, digest, parts_of
from octavo.frontend.media.inputs import MODALITIES, MediaInputs, MediaURL, is_tensor
from octavo.frontend.media.objects import to_image
from octavo.frontend.media.placement import Prepared, place_items
from octavo.frontend.media.pool import PreparationPool
from octavo.frontend.media.processors.media import MediaProcessor
from octavo.frontend.media.registry import NUMBERED, processors_of
from octavo.frontend.media.video import VideoLimits, to_video
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.media import EMBEDS, MediaItem, Source

_WHOLE = "processor_config.json"


class MediaReader:
    """Reads items for one model. Thread-safe."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        """Raises BadCheckpoint, ConfigError."""
        self._config = media = config.media
        folder = Path(config.checkpoint.path)
        self._architecture = config.checkpoint.media_architecture
        kinds, self._tokenizer = (
            [k.load(self._architecture) for k in processors_of(self._architecture)],
            tokenizer,
        )
        kind, whole, own = kinds[0], config.checkpoint.config, media.mm_processor_kwargs
        stored = [
            whole.get("preprocessor_config")
            or _read_settings(folder, "preprocessor_config.json", each.SETTINGS)
            for each in kinds
        ]
        made = [
            each(whole, given | each.OVERRIDES | own, self._encode)
            for each, given in zip(kinds, stored, strict=True)
        ]
        self.processor: Any = made[0]
        if config.parallel.device != "cpu":
            self.processor.settings = {**self.processor.settings, "resamples_later": True}
        self.processor.hearing = self.hearing = made[-1]
        if unknown := sorted(set(own) - kind.options()):
            raise ConfigError(f"Unknown mm_processor_kwargs {', '.join(unknown)}. Known: {_names(kind)}.")
        if kind.VIDEO_DEFAULTS is not None:
            of_videos = _read_settings(folder, "video_preprocessor_config.json", "video_processor")
            self.processor.read_video_settings((of_videos or stored[0]) | own)
        self._sampling = {"num_frames": 32, "fps": -1} | media.media_io_kwargs.get("video", {})
        pooling, width = config.pooling, config.checkpoint.embedding_size
        self._embedding_size = pooling.embedding_size if pooling and pooling.is_contrastive else width
        scheduler = config.scheduler
        self._longest = min(scheduler.max_chunk, scheduler.max_num_batched_tokens - scheduler.max_num_seqs)
        self._doors = {modality: MediaDoor(media, modality) for modality in MODALITIES}
        self._pool = PreparationPool(media.media_processes)
        most = int(media.mm_processor_cache_gb * 2**30)
        self._cache: LRU[bytes, Prepared] = LRU(most - most // 4)
        self._identities = Identities(most // 4)
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(256)]
        """Of those who ask for the same content, by the first byte of its key: the first prepares it."""
        self.on_lookup: Callable[..., None] = lambda *, is_known: None
        """Is told of each look into the cache."""
        self.on_prepared: Callable[[float], None] = lambda seconds: None
        """Is told how long each item took that was not found there."""

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("Images of this model need its tokenizer: leave skip_tokenizer_init out.")
        return self._tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def clear(self) -> None:
        """Forget what was prepared."""
        self._identities.clear()
        with self._lock:
            self._cache.clear()

    def read(self, inputs: MediaInputs, salt: str) -> list[Prepared]:
        """Prepare all items of a prompt. salt: of the cache; names of other salts are other names.

        Raises RequestError.
        """
        self._check_counts(inputs)
        beside = self.processor.beside(frozenset(inputs.items))
        kwargs = {**self._checked_kwargs(inputs.kwargs), **beside}
        prepared = []
        for modality, items in inputs.items.items():
            names = inputs.uuids.get(modality) or [None] * len(items)
            for item, name in zip(items, names, strict=True):
                prepared.append(self._read(modality, item, name, kwargs, salt))
        return prepared

    def place(self, ids: list[int], prepared: Sequence[Prepared]) -> tuple[list[int], list[MediaItem]]:
        """Put what stands for the items in the place of their markers.

        Raises RequestError if they do not match.
        """
        return place_items(self.processor, ids, prepared, self._longest)

    def spelled(self, text: str) -> str:
        """Return the text of a prompt with the tokens that stand for the items which it counts."""
        if (pattern := NUMBERED.get(self._architecture)) is None or self._tokenizer is None:
            return text
        markers = {modality: number for number, modality in self.processor.markers.items()}
        spell = self._tokenizer.convert_ids_to_tokens
        return re.sub(pattern, lambda found: spell([markers[found[1]]])[0], text)

    def _check_counts(self, inputs: MediaInputs) -> None:
        for modality, items in inputs.items.items():
            limit = self._config.limit_mm_per_prompt.get(modality)
            most = limit.get("count") if isinstance(limit, Mapping) else limit
            if modality not in self.processor.modalities:
                most = 0
            if most is not None and len(items) > most:
                raise RequestError(
                    f"At most {most} {modality}(s) may be provided in one prompt.", "multi_modal_data"
                )

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if unknown := sorted(set(kwargs) - self.processor.options()):
            raise RequestError(
                f"Unknown mm_processor_kwargs {', '.join(unknown)}. Known: {_names(type(self.processor))}.",
                "mm_processor_kwargs",
            )
        return kwargs

    def _read(
        self, modality: str, item: Any, name: str | None, kwargs: Mapping[str, Any], salt: str
    ) -> Prepared:
        if isinstance(item, Prepared):
            return item
        if is_embeds(item, modality):
            return self._read_embeds(modality, item)
        is_video = modality == "video"
        own = self.processor.video_settings | self._sampling if is_video else self._of(modality).settings
        settings = {**own, **kwargs}
        made_by = msgspec.json.encode([self._architecture, modality, settings], order="deterministic")
        if name is not None:
            key = digest(b"uuid", made_by, salt.encode("utf-8", "surrogatepass"), name.encode())
            if (known := self._find(key)) is not None:
                return known
            if item is None:
                raise RequestError(
                    f"The {modality} named {name!r} is not in the cache (any more): send its content.",
                    "multi_modal_uuids",
                )
            return self._keep(modality, item, key, settings)
        if item is None:
            raise RequestError(f"The {modality} must be given, or named by a uuid.", "multi_modal_data")
        content, identity = self._identify(modality, item, salt)
        key = digest(b"content", made_by, identity)
        with self._turns[key[0]]:
            return self._find(key) or self._keep(modality, content, key, settings)

    def _identify(self, modality: str, item: Any, salt: str) -> tuple[Any, bytes]:
        """Return an item, fetched unless its URL holds it and is known, and the digest of its content."""
        if not isinstance(item, MediaURL):
            return item, self._identities.of(tuple(parts_of(item)), salt, digest)
        holds_it = item.url[:5].lower() == "data:"
        if holds_it and (known := self._identities.find((item.url,), salt)) is not None:
            return item, known
        content = self._doors[modality].fetch(item.url)
        if holds_it:
            return content, self._identities.of((item.url,), salt, lambda _: digest(*parts_of(content)))
        return content, self._identities.of(tuple(parts_of(content)), salt, digest)

    def _of(self, modality: str) -> Any:
        return self.hearing if modality == "audio" else self.processor

    def _find(self, key: bytes) -> Prepared | None:
        with self._lock:
            found = self._cache.get(key)
        self.on_lookup(is_known=found is not None)
        return found

    def _keep(self, modality: str, item: Any, key: bytes, settings: Mapping[str, Any]) -> Prepared:
        start = time.perf_counter()
        prepared = self._prepare(modality, item, key, settings)
        self.on_prepared(time.perf_counter() - start)
        with self._lock:
            self._cache.put(prepared.key, prepared, prepared.num_bytes)
        return prepared

    def _prepare(self, modality: str, item: Any, key: bytes, settings: Mapping[str, Any]) -> Prepared:
        """Prepare here what is an image already, and in another process what is a file."""
        content = self._doors[modality].fetch(item.url) if isinstance(item, MediaURL) else item
        media, processor = self._config, self._of(modality)
        video = self._video_limits(settings) if modality == "video" else None
        audio = self._audio_limits() if modality == "audio" else None
        if isinstance(content, bytes):
            limits = media.max_image_pixels, media.media_decode_timeout
            features = self._pool.ask(
                Question(self._architecture, dict(settings), content, *limits, video, audio)
            ).features
        else:
            try:
                if audio is not None:
                    arrays = processor.prepare(to_waveform(content, audio), settings)
                elif video is not None:
                    arrays = processor.prepare_video(*to_video(content, video), settings)
                else:
                    arrays = processor.prepare(to_image(content), settings)
            except FAULTS as error:
                if isinstance(error, RequestError):
                    raise
                raise RequestError(UNFIT.format(modality, error), "mm_processor_kwargs") from None
            features = pack(arrays)
        arrays = {n: np.frombuffer(f.data, f.dtype).reshape(f.shape) for n, f in features.items()}
        tokens = processor.tokens(arrays) if video is None else processor.video_tokens(arrays)
        if not tokens:
            raise RequestError(
                f"The {modality} is too short: no token would stand for it.", "multi_modal_data"
            )
        return Prepared(modality, key, tokens, features)

    def source(self, prepared: Sequence[Prepared]) -> Source:
        """Return what an encoder-decoder's encoder reads. Raises RequestError unless it is one item."""
        if len(prepared) != 1:
            [modality] = self.processor.modalities
            raise RequestError(
                f"A prompt of this model needs one {modality}; {len(prepared)} are given.", "multi_modal_data"
            )
        return Source(prepared[0].key, len(prepared[0].tokens), prepared[0].features)

    def decode(self, content: bytes) -> np.ndarray:
        """Return the sound of a file, decoded in another process: [samples] float32."""
        limits = self._config.max_image_pixels, self._config.media_decode_timeout
        audio = self._audio_limits(is_plain=True)
        question = Question(self._architecture, {}, content, *limits, None, audio)
        [sound] = self._pool.ask(question).features.values()
        return np.frombuffer(sound.data, sound.dtype)

    def _audio_limits(self, *, is_plain: bool = False) -> AudioLimits:
        return AudioLimits(self.hearing.rate, self._config.max_audio_seconds, is_plain)

    def _video_limits(self, settings: Mapping[str, Any]) -> VideoLimits:
        media, sampling = self._config, (settings.get("num_frames"), settings.get("fps"))
        if not all(isinstance(number, int | float) for number in sampling):
            raise RequestError("num_frames and fps must be numbers; -1 = all.", "mm_processor_kwargs")
        limits = media.max_video_frames, media.max_video_seconds, media.max_image_pixels
        return VideoLimits(*limits, int(settings["num_frames"]), float(settings["fps"]))

    def _read_embeds(self, modality: str, given: Any) -> Prepared:
        """Take outputs of the encoder, [tokens, embedding_size]; with the grid, where positions need it."""
        name = f"{modality}_embeds"
        if not self._config.enable_mm_embeds:
            raise RequestError(
                f"You must set `--enable-mm-embeds` (enable_mm_embeds=True) to input `{name}`.",
                "multi_modal_data",
            )
        told: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        array = float_array(told[name] if told else given)
        processor = self._of(modality)
        size = self._embedding_size * (1 + processor.num_deep_layers)
        if array is None or array.ndim != 2 or array.shape[1] != size:
            raise RequestError(
                f"{name} must be floats of shape (num_tokens, {size}) for this model, "
                f"got {getattr(array, 'shape', type(given).__name__)}.",
                "multi_modal_data",
            )
        if not np.isfinite(array).all():
            raise RequestError(f"{name} must hold finite numbers.", "multi_modal_data")
        tokens, arrays = processor.read_embeds(modality, len(array), told)
        features = pack({**arrays, EMBEDS: array})
        key = digest(b"embeds", modality.encode(), *(part.data for part in features.values()))
        return Prepared(modality, key, tokens, features)


def is_embeds(item: Any, modality: str) -> bool:
    """Return True for outputs of the encoder: an object that says so or, of images, a matrix of numbers."""
    if isinstance(item, Mapping):
        return f"{modality}_embeds" in item
    return (
        modality == "image" and getattr(item, "ndim", 0) == 2 and (is_tensor(item) or item.dtype.kind == "f")
    )


def float_array(value: Any) -> Any:
    """Return a tensor or an array of floats as one of float32; None for anything else."""
    if is_tensor(value):
        value = value.detach().cpu().float().numpy() if value.is_floating_point() else None
    if getattr(value, "dtype", None) is None or value.dtype.kind != "f":
        return None
    return np.ascontiguousarray(value, np.float32)


def _read_settings(folder: Path, name: str, part: str) -> dict[str, Any]:
    """Read a processor's file: its own or, as transformers 5 writes it, a part of one for all."""
    if (folder / name).is_file():
        return read_json(folder / name)
    whole = read_json(folder / _WHOLE) if (folder / _WHOLE).is_file() else {}
    found = whole.get(part)
    return found if isinstance(found, dict) else {}


def _names(kind: type[MediaProcessor]) -> str:
    return ", ".join(sorted(kind.options()))
