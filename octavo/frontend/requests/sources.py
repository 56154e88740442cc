"""`Sources` reads prompts of encoder-decoders: what the encoder reads, and what the output follows."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

from octavo.base.errors import PromptTooLong, RequestError, wrong
from octavo.config.engine import EngineConfig
from octavo.frontend.requests.media import PromptMedia
from octavo.frontend.requests.options import RequestOptions, TokenizationOptions
from octavo.frontend.requests.prompts import ParsedPrompt
from octavo.frontend.speech.model import SpeechModel
from octavo.messages.media import Features, Source

TEXT_SOURCES = ("BartForConditionalGeneration", "T5ForConditionalGeneration")
"""Encoder-decoders whose encoders read texts."""
Tokenize = Callable[[str, TokenizationOptions], list[int]]


class Sources:
    """Knows what one model's encoder takes."""

    def __init__(
        self, config: EngineConfig, media: PromptMedia, speech: SpeechModel | None, tokenize: Tokenize
    ) -> None:
        given = config.checkpoint.config | config.checkpoint.generation_config
        self._media, self._speech, self._tokenize = media, speech, tokenize
        self._architecture = config.architecture
        self._is_text = config.architecture in TEXT_SOURCES
        start = given.get("decoder_start_token_id")
        self._start = start if isinstance(start, int) else 0
        forced = given.get("forced_bos_token_id")
        self._begin = [self._start, forced] if isinstance(forced, int) else [self._start]
        """What a decoder begins with, if nothing is written for it."""
        self._longest = config.checkpoint.max_source_tokens
        self.is_needed = self._is_text or media.needs_source
        """Whether prompts of this model have a source."""

    def read(self, prompt: ParsedPrompt, options: RequestOptions) -> ParsedPrompt:
        """Return the prompt of the decoder, as ids, with its source. Raises RequestError."""
        if not self.is_needed:
            if prompt.encoder is not None:
                raise wrong(
                    "encoder_prompt",
                    f"is for encoder-decoder models; {self._architecture} has no encoder: "
                    "give prompt or prompt_token_ids",
                )
            return prompt
        if prompt.embeds is not None or options.prompt_adapter_request is not None:
            raise RequestError(
                "Encoder-decoder models take neither prompt_embeds nor prompt adapters.", "prompt_embeds"
            )
        if not self._is_text:
            source = self._media.source(prompt, options)
            ids = self._ids(prompt, RequestOptions())
            ids = self._speech.begun(ids) if self._speech else ids
            return replace(prompt, token_ids=ids, source=source, media=None)
        encoder = prompt if prompt.encoder is None else prompt.encoder
        ids = [] if prompt.encoder is None else self._ids(prompt, RequestOptions())
        ids = self._begin if not ids else ids if ids[0] == self._start else [self._start, *ids]
        text = None if prompt.encoder is None else prompt.text
        source = self._text_source(encoder, options)
        return replace(prompt, text=text, encoder=encoder, token_ids=ids, source=source)

    def _ids(self, prompt: ParsedPrompt, options: RequestOptions) -> list[int]:
        """Return what is written for the decoder: the model's own beginning is added, or there already."""
        if prompt.token_ids is not None or prompt.text is None:
            return prompt.token_ids or []
        return self._tokenize(prompt.text, replace(options.tokenization, add_special_tokens=False))

    def _text_source(self, encoder: ParsedPrompt, options: RequestOptions) -> Source:
        ids = encoder.token_ids
        if ids is None:
            ids = self._tokenize(encoder.text or "", options.tokenization)
        if not ids:
            raise RequestError("The encoder prompt cannot be empty.", "encoder_prompt")
        if len(ids) > self._longest:
            raise PromptTooLong(
                f"The encoder prompt has {len(ids)} tokens; this model's encoder reads at most "
                f"{self._longest}.",
                "encoder_prompt",
            )
        data = array("q", ids).tobytes()
        features = {"input_ids": Features("int64", [len(ids)], data)}
        return Source(sha256(data).digest(), len(ids), features, ids)
