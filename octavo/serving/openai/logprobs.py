"""Logprobs in OpenAI's two forms, that of completions and that of chat."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.outputs.logprobs import Logprob, PositionLogprobs, PromptLogprobs
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import ChatLogprobs, CompletionLogprobs, Logprobs, TokenLogprob, TopLogprob
from octavo.serving.openai.protocol import SamplingFields

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """How one request wants its logprobs written."""

    tokenizer: Tokenizer | None
    num_top: int
    """Alternatives per position."""
    candidates: frozenset[int] | None
    """Tokens to be shown instead."""
    as_ids: bool
    """Tokens are called token_id:N."""

    def chat(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
        """Of the tokens of an answer."""
        entries = []
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = self._entry(token_id, position[token_id])
            top = [self._entry(other, entry) for other, entry in self._top(token_id, position)]
            entries.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
        return ChatLogprobs(entries)

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offset: int = 0
    ) -> CompletionLogprobs:
        """Of the tokens of a completion; offset: characters of text before them."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            token = self._name(token_id, position[token_id] if position else None)
            written.text_offset.append(offset)
            written.tokens.append(token)
            written.token_logprobs.append(_finite(position[token_id].logprob) if position else None)
            written.top_logprobs.append(self._by_name(token_id, position) if position else None)
            offset += len(token)
        return written

    def _by_name(self, chosen: int, position: PositionLogprobs) -> dict[str, float]:
        """The chosen token and the top; of two that are spelled alike the likelier one counts."""
        named: dict[str, float] = {}
        for token_id, entry in [(chosen, position[chosen]), *self._top(chosen, position)]:
            name, logprob = self._name(token_id, entry), _finite(entry.logprob)
            named[name] = max(logprob, named.get(name, logprob))
        return named

    def _top(self, chosen: int, position: PositionLogprobs) -> list[tuple[int, Logprob]]:
        """What was asked for, most likely first; with tokens that were named, the chosen one besides."""
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        if self.candidates is not None:
            return [item for item in ranked if item[0] in self.candidates or item[0] == chosen]
        return ranked if self.num_top < 0 else ranked[: self.num_top]

    def _entry(self, token_id: int, entry: Logprob) -> TopLogprob:
        spelled = None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))
        return TopLogprob(self._name(token_id, entry), _finite(entry.logprob), spelled)

    def _name(self, token_id: int, entry: Logprob | None) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)


def logprob_writer(caller: Caller, request: SamplingFields, num_top: int | None) -> LogprobWriter | None:
    """As the request wants them; None when it wants none. num_top: alternatives, None = no logprobs."""
    if num_top is None and request.logprob_token_ids is None:
        return None
    candidates = request.logprob_token_ids
    return LogprobWriter(
        caller.engine.tokenizer,
        num_top or 0,
        None if candidates is None else frozenset(candidates),
        bool(request.return_tokens_as_token_ids or caller.config.return_tokens_as_token_ids),
    )


def prompt_logprobs(positions: PromptLogprobs) -> list[Logprobs | None]:
    """Of a prompt, by token id."""
    return [None if position is None else _by_id(position) for position in positions]


def _by_id(position: PositionLogprobs) -> Logprobs:
    return {
        str(token_id): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
