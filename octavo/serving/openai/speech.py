"""`Transcription`: the engine's work for one file of speech, whose windows become segments and words.

Windows are requests like others, batched with each other and with whatever runs; their texts are told in
order.
"""

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from octavo.base.errors import RequestError
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.requests.prompts import PromptType
from octavo.frontend.speech.fallback import Fallback
from octavo.frontend.speech.model import SpeechModel, Task
from octavo.frontend.speech.segments import Segment, compression_ratio, read_segments
from octavo.frontend.speech.windows import Window, split
from octavo.frontend.speech.words import Word, read_words, time_tokens
from octavo.messages.sampling import SamplingParams
from octavo.serving.caller import Caller
from octavo.serving.openai.generation import Generation
from octavo.serving.openai.protocol import CompletionRequest

_SECONDS_PER_POSITION = 0.02


@dataclass(slots=True)
class Transcript:
    """What was said. duration: seconds"""

    text: str
    duration: float
    language: str
    segments: list[Segment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)


@dataclass(slots=True)
class _Decoded:
    """A window's transcript, and the temperature at which it was decoded."""

    output: RequestOutput
    temperature: float

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    @property
    def avg_logprob(self) -> float:
        """The mean over all tokens, the last one too."""
        completion = self.completion
        scores = [
            at[i].logprob for i, at in zip(completion.token_ids, completion.logprobs or (), strict=True)
        ]
        return sum(scores) / len(scores) if scores else 0.0

    @property
    def no_speech_prob(self) -> float | None:
        """That there is none; None where the model has no token for that."""
        scores = self.output.prompt_token_id_logprobs
        return math.exp(scores[0][0]) if scores else None


@dataclass(slots=True)
class Transcription:
    """One file that is decoded. fields: temperature and the like; previous: tokens of a text before it"""

    caller: Caller
    speech: SpeechModel
    task: Task
    fields: CompletionRequest
    windows: list[Window]
    rate: int
    language: str
    has_times: bool
    previous: list[int]
    fallback: Fallback

    @classmethod
    async def of(
        cls,
        caller: Caller,
        fields: CompletionRequest,
        content: bytes,
        task: Task,
        language: str,
        prompt: str,
        *,
        has_times: bool,
        fallback: Fallback,
    ) -> "Transcription":
        """Decode a file, and find out its language if need be. Raises RequestError, Overloaded."""
        engine = caller.engine
        speech = engine.input_processor.speech
        if speech is None:
            name = "Transcriptions" if task == "transcribe" else "Translations"
            raise RequestError(f"The model does not support {name} API", "model")
        if language and speech.is_multilingual:
            language = speech.checked(language)
        reader = engine.input_processor.media.reader
        processor = reader.processor
        waveform = await engine.off_loop(partial(reader.decode, content), is_media=True)
        windows = await engine.off_loop(
            partial(split, waveform, processor.rate, processor.settings["chunk_length"])
        )
        previous = engine.tokenizer.encode(" " + prompt.strip(), False) if prompt and engine.tokenizer else []
        rate, told = processor.rate, (language, has_times, previous, fallback)
        made = cls(caller, speech, task, fields, windows, rate, *told)
        if not language and speech.is_multilingual:
            made.language = await made._detect()
        return made

    @property
    def duration(self) -> float:
        """Seconds of sound."""
        last = self.windows[-1]
        return last.start_s + len(last.samples) / self.rate

    async def deltas(self) -> AsyncGenerator[str, None]:
        """The text as it comes, window after window; what is told cannot be decoded again."""
        waiting: dict[int, list[str]] = {index: [] for index in range(len(self.windows))}
        ended: set[int] = set()
        current, is_begun = 0, False
        async with aclosing(self._generation().outputs()) as outputs:
            async for index, output in outputs:
                waiting[index].append(output.outputs[0].text)
                if output.finished:
                    ended.add(index)
                while current < len(self.windows):
                    for text in waiting[current]:
                        shown = text if is_begun else text.lstrip()
                        if shown:
                            is_begun = True
                            yield shown
                    waiting[current].clear()
                    if current not in ended:
                        break
                    current += 1
                    if is_begun and current < len(self.windows):
                        waiting[current].insert(0, " ")

    async def whole(self, *, wants_words: bool) -> Transcript:
        """The transcript, with segments and words where times were asked for."""
        every = await self._decoded()
        made = Transcript("", round(self.duration, 3), self.language)
        if not self.has_times:
            made.text = " ".join(text for one in every if (text := one.completion.text.strip()))
            return made
        for window, one in zip(self.windows, every, strict=True):
            segments = self._segments(window, one.completion, made.segments)
            for segment in segments:
                segment.no_speech_prob, segment.temperature = one.no_speech_prob, one.temperature
            made.segments += segments
        made.text = "".join(segment.text for segment in made.segments).strip()
        if wants_words:
            made.words = await self._words([one.output for one in every])
        return made

    async def _decoded(self) -> list[_Decoded]:
        """All windows; poor transcripts are decoded again, and silence has none."""
        generation, rules = self._generation(is_scored=True), self.fallback
        first = generation.params.temperature
        every = [_Decoded(output, first) for output in await generation.results()]
        for number, temperature in enumerate(rules.temperatures(first)):
            poor = [i for i, one in enumerate(every) if self._is_poor(one)]
            if not poor:
                break
            again = replace(
                generation,
                prompts=[generation.prompts[i] for i in poor],
                params=msgspec.structs.replace(generation.params, temperature=temperature),
                request_id=self._id(f"again-{number}"),
            )
            for i, output in zip(poor, await again.results(), strict=True):
                every[i] = _Decoded(output, temperature)
        for one in every:
            if rules.is_silence(one.no_speech_prob, one.avg_logprob):
                one.completion.text, one.completion.token_ids, one.completion.logprobs = "", [], []
        return every

    def _is_poor(self, one: _Decoded) -> bool:
        ratio, score = compression_ratio(one.completion.text), one.avg_logprob
        return self.fallback.is_poor(ratio, score) and not self.fallback.is_silence(one.no_speech_prob, score)

    def _segments(
        self, window: Window, completion: CompletionOutput, earlier: Sequence[Segment]
    ) -> list[Segment]:
        kept = [
            (token, position[token].logprob)
            for token, position in zip(completion.token_ids, completion.logprobs or (), strict=True)
            if token < self.speech.end_id or token >= self.speech.timed.first_timestamp
        ]
        return read_segments(
            [token for token, _ in kept],
            [logprob for _, logprob in kept],
            self.speech.timed.first_timestamp,
            self._decode,
            window.start_s,
            window.start_s + len(window.samples) / self.rate,
            earlier[-1].end if earlier else 0.0,
        )

    async def _words(self, outputs: Sequence[RequestOutput]) -> list[Word]:
        """Find out when each word was said, by a second look at the windows with their transcripts."""
        if not self.speech.alignment_heads:
            raise RequestError(
                "This model does not say which heads tell the times of words (alignment_heads in "
                "generation_config.json).",
                "timestamp_granularities",
            )
        prompts = [[*(o.prompt_token_ids or ()), *o.outputs[0].token_ids] for o in outputs]
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            returns_alignment=True,
            skip_reading_prefix_cache=True,
            detokenize=False,
        )
        aligned = await replace(
            self._generation(), prompts=self._prompts(prompts), params=params, request_id=self._id("align")
        ).results()
        words: list[Word] = []
        for window, output, found in zip(self.windows, outputs, aligned, strict=True):
            work = partial(self._window_words, window, output, found)
            words += await self.caller.engine.off_loop(work)
        return words

    def _window_words(self, window: Window, output: RequestOutput, found: RequestOutput) -> list[Word]:
        tokens = [t for t in output.outputs[0].token_ids if t != self.speech.end_id]
        if not tokens or found.pooled is None:
            return []
        first = len(output.prompt_token_ids or ())
        weights = np.frombuffer(found.pooled.data, np.float32).reshape(found.pooled.shape)
        seconds = len(window.samples) / self.rate
        times = time_tokens(weights[:, first : first + len(tokens)], int(seconds / _SECONDS_PER_POSITION))
        return read_words(tokens, times, self.speech.end_id, self._decode, self.language, window.start_s)

    async def _detect(self) -> str:
        allowed = sorted(self.speech.languages.values())
        fields = CompletionRequest(allowed_token_ids=allowed, max_tokens=1, temperature=0.0)
        generation = replace(
            self._generation(),
            prompts=self._prompts([[self.speech.start_id, self.speech.no_timestamps_id]])[:1],
            params=SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=allowed, detokenize=False),
            request=fields,
            request_id=self._id("detect"),
        )
        [output] = await generation.results()
        codes = {number: code for code, number in self.speech.languages.items()}
        return codes[output.outputs[0].token_ids[0]]

    def _generation(self, *, is_scored: bool = False) -> Generation:
        """Return the work for all windows. is_scored: with what `Fallback` looks at"""
        language = self.language or next(iter(self.speech.languages), "")
        ids = self.speech.prompt(language, self.task, timestamps=self.has_times, previous=self.previous)
        made = Generation.of(self.caller, self.fields, "transcribe", self._prompts([ids] * len(self.windows)))
        room = self.caller.engine.input_processor.max_model_len - len(ids) - self.has_times  # for `_words`
        params = msgspec.structs.replace(
            made.params,
            max_tokens=min(self.fields.max_tokens or room, room),
            logprobs=0 if is_scored else None,
        )
        if is_scored and self.speech.no_speech_id >= 0:
            params.prompt_logprob_token_ids = [self.speech.no_speech_id]
            params.prompt_logprob_start = ids.index(self.speech.start_id)
        return replace(made, params=params)

    def _prompts(self, every: Sequence[list[int]]) -> list[PromptType]:
        return [
            {"prompt_token_ids": ids, "multi_modal_data": {"audio": (window.samples, self.rate)}}
            for ids, window in zip(every, self.windows, strict=False)
        ]

    def _id(self, kind: str) -> str:
        return f"{kind}-{self.caller.request_id}"

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer: Any = self.caller.engine.tokenizer
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
