"""`PromptLimits`: which prompts a model takes. Asked by the input processor, for every prompt."""

from octavo.base.errors import PromptTooLong, RequestError, wrong
from octavo.config.engine import EngineConfig
from octavo.frontend.text.tokenizer import Tokenizer


class PromptLimits:
    """Raises errors for prompts that are too long or hold ids of no token."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.max_model_len = config.model.max_model_len
        """Of prompt and output; the start of the engine may lower it."""
        self._vocab_size = config.checkpoint.vocab_size
        self._pools = config.pooling.tasks[0] if config.pooling is not None else ""
        self._tokenizer = tokenizer

    def may_fit(self, text: str) -> bool:
        """Return True if a text could be short enough, whatever its tokens are."""
        return len(text) <= self.max_model_len or self._fewest_tokens(text) < self.max_model_len

    def check_chars(self, text: str) -> None:
        """Refuse a text before work is spent, if no tokens could make it short enough."""
        if not self.may_fit(text):
            raise self._too_long(f"at least {self._fewest_tokens(text)}")

    def check(self, ids: list[int], max_output_tokens: int, most: int = 0) -> None:
        """Raise RequestError for a prompt of these tokens. most: of them; 0 = one less than the context"""
        if not ids:
            raise RequestError("The decoder prompt cannot be empty.", "prompt")
        if len(ids) > (most or self.max_model_len - 1):
            raise self._too_long(str(len(ids)))
        if (room := self.max_model_len - len(ids)) < max_output_tokens:
            raise wrong(
                "max_tokens",
                f"must be at most {room} here, got {max_output_tokens}: of the context of "
                f"{self.max_model_len} tokens the prompt takes {len(ids)}. Leave it out to use what is left",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            outside = low if low < 0 else high
            raise RequestError(
                f"Token id {outside} is out of vocabulary (0 to {self._vocab_size - 1}).", "prompt_token_ids"
            )

    def _too_long(self, num_tokens: str) -> PromptTooLong:
        if self._pools:
            return PromptTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{num_tokens} tokens in the input for {self._pools}. Please reduce the "
                "length of the input, or set truncate_prompt_tokens.",
                "prompt",
            )
        return PromptTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your request has "
            f"{num_tokens} input tokens, and at least one token must be left for the output. "
            "Please reduce the length of the prompt.",
            "prompt",
        )

    def _fewest_tokens(self, text: str) -> int:
        return -(-len(text) // self._tokenizer.max_token_chars) if self._tokenizer else 0
