"""Logprobs of prompt tokens and of candidates beside them: what may be asked, and collecting it by chunks.

Used by the input processor (the check) and by open requests (`PromptScores`). The core sends one entry per
prompt position but the first: the token itself and its most likely alternatives (for prompt_logprobs),
then the position's candidates. The entry of a position that was found in the prefix cache is empty.
"""

from octavo.base.errors import wrong
from octavo.frontend.outputs.logprobs import LogprobSpeller, PromptLogprobs, kept_logprobs
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import TokenLogprobs
from octavo.messages.sampling import SamplingParams


def check_prompt_scoring(
    params: SamplingParams, num_tokens: int, *, given_as_embeds: bool, is_soft: bool
) -> None:
    """What of the prompt is to be scored, or told, must be there. Raises RequestError."""
    if params.routed_experts_prompt_start > num_tokens:
        name, given = "routed_experts_prompt_start", params.routed_experts_prompt_start
        raise wrong(name, f"must be between 0 and {num_tokens}, got {given}")
    candidates, start = params.prompt_candidates, params.prompt_logprob_start
    if given_as_embeds and (candidates or params.prompt_logprobs is not None):
        name = "prompt_logprob_token_ids" if params.prompt_logprobs is None else "prompt_logprobs"
        raise wrong(name, "is not compatible with prompt embeds: they have no tokens")
    if is_soft and candidates:
        name = "prompt_logprob_token_ids"
        raise wrong(name, "is not for requests with a prompt adapter: use prompt_logprobs")
    num_scored = num_tokens - 1 - start
    if candidates and num_scored < 1:
        raise wrong(
            "prompt_logprob_start",
            f"must be less than {num_tokens - 1} for a prompt of {num_tokens} tokens, got {start}",
        )
    if len(candidates) > 1 and len(candidates) != num_scored:
        raise wrong(
            "prompt_logprob_token_ids",
            f"must be one list, or one for each of the {num_scored} scored positions, got {len(candidates)}",
        )


class PromptScores:
    """What the core has sent of one prompt, as users see it; None where nothing was asked for."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, num_virtual: int = 0) -> None:
        """num_virtual: tokens before the prompt, which users do not see"""
        self._num_hidden = num_virtual
        self.logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.logprobs = kept_logprobs(params.prompt_logprobs, flat=params.flat_logprobs)
            self.logprobs.append(None)
        self.of_candidates: list[list[float]] | None = [] if params.prompt_candidates else None
        self._candidates = params.prompt_candidates
        self._start = params.prompt_logprob_start
        self._num_taken = 0
        self._speller = LogprobSpeller(tokenizer if params.detokenize else None)

    def take(self, entries: list[TokenLogprobs]) -> None:
        """The entries of the next positions."""
        for entry in entries:
            if self._num_hidden:
                self._num_hidden -= 1
                continue
            row = self._num_taken - self._start
            self._num_taken += 1
            end = len(entry.token_ids) - self._num_candidates(row)
            if row >= 0 and self.of_candidates is not None:
                self.of_candidates.append(entry.logprobs[end:])
            if self.logprobs is not None:
                self._speller.append(self.logprobs, entry, end)

    def _num_candidates(self, row: int) -> int:
        if row < 0 or not self._candidates:
            return 0
        return len(self._candidates[row if len(self._candidates) > 1 else 0])
