"""`PromptMedia`: images, videos and audio of prompts. For a model of text alone it loads nothing of media."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from octavo.base.cores import usable_cores
from octavo.base.errors import ConfigError, RequestError
from octavo.base.registry import load_object
from octavo.config.engine import EngineConfig
from octavo.frontend.media.inputs import MediaInputs, read_inputs
from octavo.frontend.media.registry import processors_of
from octavo.frontend.requests.options import RequestOptions
from octavo.frontend.requests.prompts import ParsedPrompt, PromptType
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.media import MediaItem, Source

Modality = Literal["text", "image", "video", "audio"]
_READER = "octavo.frontend.media.reader:MediaReader"
_DATA, _UUIDS, _KWARGS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"


class PromptMedia:
    """Reads and places items, if the model takes some. Thread-safe."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        """Raises ConfigError without Pillow, BadCheckpoint."""
        self._architecture, self._reader = config.architecture, None
        if processors_of(config.architecture):
            try:
                self._reader = load_object(_READER)(config, tokenizer)
            except ImportError as error:
                raise ConfigError(
                    f"{config.architecture} takes media, which need octavo[media] ({error}): install it."
                ) from error

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What prompts may be made of."""
        return ("text",) if self._reader is None else ("text", *self._reader.processor.modalities)

    @property
    def needs_source(self) -> bool:
        """Whether every prompt needs an item for the model's encoder."""
        return self._reader is not None and self._reader.processor.is_source

    @property
    def reader(self) -> Any:
        """The MediaReader of a model that takes images. Raises RequestError for others."""
        if self._reader is None:
            raise RequestError(
                f"At most 0 image(s) may be provided in one prompt: {self._architecture} takes text only.",
                _DATA,
            )
        return self._reader

    def tell(self, on_lookup: Callable[..., None], on_prepared: Callable[[float], None]) -> None:
        """Have them told of each look into the cache of prepared items, and of seconds that others take."""
        if self._reader is not None:
            self._reader.on_lookup, self._reader.on_prepared = on_lookup, on_prepared

    def is_in(self, prompt: PromptType) -> bool:
        """Whether there is something to read."""
        return isinstance(prompt, Mapping) and bool(prompt.get(_DATA) or prompt.get(_UUIDS))

    def read(self, prompt: PromptType, options: RequestOptions) -> PromptType:
        """The same prompt with its items prepared, which may take seconds. Raises RequestError."""
        if not isinstance(prompt, Mapping):
            return prompt
        inputs = read_inputs(*(prompt.get(name) for name in (_DATA, _UUIDS, _KWARGS)))
        if inputs is None:
            return prompt
        prepared = self._prepare(inputs, str(prompt.get("cache_salt") or ""), options)
        rest = {name: value for name, value in prompt.items() if name not in (_UUIDS, _KWARGS)}
        by_modality: dict[str, list[Any]] = {}
        for item in prepared:
            by_modality.setdefault(item.modality, []).append(item)
        return {**rest, _DATA: by_modality}  # type: ignore[return-value]  # still one of the forms

    def read_all(self, prompts: Sequence[Any], options: Sequence[RequestOptions]) -> list[Any]:
        """`read` of many prompts, on as many threads as there are cores; of those with names nothing is read.

        A name may stand for what a prompt before has brought.
        """
        chosen = [at for at, one in enumerate(prompts) if self.is_in(one) and not one.get(_UUIDS)]
        found = list(prompts)
        if len(chosen) > 1:
            with ThreadPoolExecutor(min(len(chosen), usable_cores())) as threads:
                read = threads.map(self.read, *([each[at] for at in chosen] for each in (prompts, options)))
                for at, prompt in zip(chosen, read, strict=True):
                    found[at] = prompt
        return found

    def place(
        self, ids: list[int], prompt: ParsedPrompt, options: RequestOptions
    ) -> tuple[list[int], list[MediaItem]]:
        """The tokens of a prompt with what stands for its items, and these. Raises RequestError."""
        if prompt.media is None and (not options.mm_processor_kwargs or prompt.source is not None):
            return ids, []
        inputs, salt = prompt.media or MediaInputs(), prompt.cache_salt
        placed: tuple[list[int], list[MediaItem]] = self.reader.place(
            ids, self._prepare(inputs, salt, options)
        )
        return placed

    def source(self, prompt: ParsedPrompt, options: RequestOptions) -> Source:
        """What the encoder of an encoder-decoder reads. Raises RequestError."""
        inputs, salt = prompt.media or MediaInputs(), prompt.cache_salt
        found: Source = self.reader.source(self._prepare(inputs, salt, options))
        return found

    def clear(self) -> None:
        """Forget what was prepared."""
        if self._reader is not None:
            self._reader.clear()

    def close(self) -> None:
        """End the processes that decode; may be called twice."""
        if self._reader is not None:
            self._reader.close()

    def _prepare(self, inputs: MediaInputs, salt: str, options: RequestOptions) -> list[Any]:
        kwargs = {**options.mm_processor_kwargs, **inputs.kwargs}
        prepared: list[Any] = self.reader.read(MediaInputs(inputs.items, inputs.uuids, kwargs), salt)
        return prepared
