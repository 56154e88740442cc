"""`SpeechModel`: the tokens by which Whisper is told what to write, and the rules of transcripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from octavo.base.errors import RequestError
from octavo.config.engine import EngineConfig
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.sampling import SamplingParams
from octavo.messages.speech import TranscriptRules

Task = Literal["transcribe", "translate"]
SECONDS_PER_TIMESTAMP = 0.02
ARCHITECTURES = ("WhisperForConditionalGeneration",)


@dataclass(frozen=True, slots=True)
class SpeechModel:
    """Ids are -1, or missing, where the model lacks the token.

    languages: ids by code ("en"), none for a model of English alone
    alignment_heads: (layer, head) of cross attention that follow the sound
    """

    start_id: int
    end_id: int
    no_timestamps_id: int
    previous_id: int
    no_speech_id: int
    languages: dict[str, int]
    tasks: dict[str, int]
    timed: TranscriptRules
    """For transcripts with times; `untimed`: for others."""
    untimed: TranscriptRules
    alignment_heads: list[tuple[int, int]]
    longest_prompt: int
    """Tokens of an earlier text; half of the context."""

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> "SpeechModel | None":
        """Read generation_config.json, and the tokenizer where that is silent; None for other models."""
        if config.architecture not in ARCHITECTURES:
            return None
        given = config.checkpoint.config | config.checkpoint.generation_config
        special = tokenizer.special_tokens if tokenizer else {}

        def named(*names: str) -> int:
            return next((special[name] for name in names if name in special), -1)

        no_timestamps = given.get("no_timestamps_token_id") or named("<|notimestamps|>")
        listed = given.get("lang_to_id") or {n: i for n, i in special.items() if _is_language(n)}
        ends = given.get("eos_token_id")
        end_id = (
            ends[0] if isinstance(ends, list) else ends if isinstance(ends, int) else named("<|endoftext|>")
        )
        first = no_timestamps + 1 if no_timestamps >= 0 else -1
        untimed = TranscriptRules(
            end_id,
            first,
            suppressed=_ids(given.get("suppress_tokens")),
            suppressed_first=_ids(given.get("begin_suppress_tokens")),
        )
        most = given.get("max_initial_timestamp_index")
        tasks = given.get("task_to_id") or {n: named(f"<|{n}|>") for n in ("transcribe", "translate")}
        return cls(
            start_id=given.get("decoder_start_token_id", named("<|startoftranscript|>")),
            end_id=end_id,
            no_timestamps_id=no_timestamps,
            previous_id=given.get("prev_sot_token_id") or named("<|startofprev|>"),
            no_speech_id=named("<|nospeech|>", "<|nocaptions|>"),
            languages={name.strip("<|>"): i for name, i in listed.items()},
            tasks={name: i for name, i in tasks.items() if i >= 0},
            timed=msgspec.structs.replace(untimed, has_times=first >= 0, max_initial=most),
            untimed=untimed,
            alignment_heads=[(layer, head) for layer, head in given.get("alignment_heads") or []],
            longest_prompt=config.model.max_model_len // 2 - 1,
        )

    @property
    def is_multilingual(self) -> bool:
        """Whether a language and a task are part of prompts."""
        return bool(self.languages)

    def prompt(
        self, language: str, task: Task, *, timestamps: bool, previous: Sequence[int] = ()
    ) -> list[int]:
        """Return what a transcript follows. previous: tokens of a text before it. Raises RequestError."""
        ids = [self.start_id]
        if previous and self.previous_id >= 0:
            ids = [self.previous_id, *previous[-self.longest_prompt :], self.start_id]
        if self.is_multilingual:
            ids += [self.languages[self.checked(language)], self.tasks[task]]
        elif task == "translate":
            raise RequestError("This model hears English alone: it does not translate.", "model")
        return ids if timestamps else [*ids, self.no_timestamps_id]

    def checked(self, language: str) -> str:
        """Return the code of a language that the model knows. Raises RequestError."""
        code = language.strip().lower()
        if code not in self.languages:
            raise RequestError(
                f"Unsupported language: {language[:40]!r}. Language must be one of "
                f"{', '.join(sorted(self.languages))}.",
                "language",
            )
        return code

    def ruled(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
        """Return parameters with the rules of what follows a prompt: with times, unless it forbids them."""
        rules = self.untimed if self.no_timestamps_id in ids else self.timed
        return msgspec.structs.replace(params, transcript_rules=rules)

    def begun(self, ids: list[int]) -> list[int]:
        """Return a prompt that begins a transcript, wherever it does."""
        return ids if self.start_id in ids else [self.start_id, *ids]


def _is_language(name: str) -> bool:
    code = name.removeprefix("<|").removesuffix("|>")
    return len(name) == len(code) + 4 and code.isalpha() and 2 <= len(code) <= 3


def _ids(given: Any) -> tuple[int, ...]:
    return tuple(i for i in given or () if isinstance(i, int))
