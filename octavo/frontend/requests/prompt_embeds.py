"""Prompts given as embeddings: reading of `{"prompt_embeds": …}`.

Called when a prompt is parsed, and by the input processor. Takes torch tensors and NumPy arrays, and imports
no torch: a tensor is turned into an array by its own methods.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.base.errors import RequestError, wrong
from octavo.config.engine import EngineConfig
from octavo.frontend.requests.options import TokenizationOptions
from octavo.messages.request import PromptEmbeds

_NAME = "prompt_embeds"


@dataclass(frozen=True, slots=True)
class ReadEmbeds:
    """Checked embeddings, ready to be sent."""

    num_tokens: int
    width: int
    message: PromptEmbeds


def read_prompt_embeds(value: Any) -> ReadEmbeds:
    """Check that it is a dense, finite [num_tokens, hidden_size] of floats. Raises RequestError."""
    array = _as_array(value)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise RequestError(
            f"prompt_embeds must be of shape (seq_len, hidden_size), got {tuple(array.shape)}.", _NAME
        )
    if not np.isfinite(array).all():
        raise RequestError("prompt_embeds must hold finite numbers, in the range of float32.", _NAME)
    num_tokens, width = array.shape
    return ReadEmbeds(num_tokens, width, PromptEmbeds(np.ascontiguousarray(array).tobytes(), width))


def placeholder_ids(embeds: ReadEmbeds, config: EngineConfig, options: TokenizationOptions) -> list[int]:
    """Return token ids that stand where the embeddings will. Raises RequestError if they do not fit."""
    if not config.model.enable_prompt_embeds:
        raise RequestError(
            "You must set `--enable-prompt-embeds` (enable_prompt_embeds=True) to input `prompt_embeds`.",
            _NAME,
        )
    width = config.checkpoint.embedding_size
    if embeds.width != width:
        raise RequestError(
            f"prompt_embeds must be of shape (seq_len, {width}) for this model, got (seq_len, "
            f"{embeds.width}).",
            _NAME,
        )
    if options.truncate_prompt_tokens is not None:
        raise wrong("truncate_prompt_tokens", "does not apply to prompt_embeds: give fewer rows")
    return [0] * embeds.num_tokens


def _as_array(value: Any) -> np.ndarray:
    """As float32, where every number of a 16-bit float has its place."""
    if hasattr(value, "detach"):
        if str(value.layout) != "torch.strided":
            raise RequestError(f"prompt_embeds must be dense, got a tensor of layout {value.layout}.", _NAME)
        if not value.is_floating_point():
            raise RequestError(f"prompt_embeds must hold floats, got {value.dtype}.", _NAME)
        value = value.detach().cpu().float().numpy()
    if not isinstance(value, np.ndarray):
        raise RequestError(
            f"prompt_embeds must be a torch tensor or a NumPy array, got {type(value).__name__}.", _NAME
        )
    if value.dtype.kind != "f":
        raise RequestError(f"prompt_embeds must hold floats, got {value.dtype}.", _NAME)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        return value.astype(np.float32, copy=False)
