"""cuDNN's fused attention computes prefill on NVIDIA GPUs; all else is as in the paged back end.

On one H200 it computes 573 TFLOP/s over 8192 tokens where our Triton kernel computes 432, and 493 against 351
for 128 tokens behind 2048 cached ones. It takes the long steps, which are never recorded: so recorded steps
and others go the same way. Chosen where the package nvidia-cudnn-frontend is installed (`octavo[cudnn]`).
"""

import importlib.util

import torch
from torch import Tensor
from torch.nn import functional

from octavo.messages.kv import HeadsKV, KVCacheSpec
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.batch import MAX_CAPTURED_TOKENS, ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import Ragged, Scores
from octavo.runtime.kernels.cudnn import Prefill, Sequences
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

_LARGEST_HEAD = 128
_MOST_ELEMENTS = 2**31  # their places are int32


class CuDNNBackend(PagedBackend):
    """Takes another kernel than the paged back end for requests with several new tokens in long steps."""

    def __init__(self, platform: Platform, input_precision: InputPrecision = "float32") -> None:
        super().__init__(platform, input_precision)
        self._prefill = Prefill()
        self._of_step: dict[int, Sequences] = {}

    @staticmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        """Serve plain causal attention over 16-bit caches, with heads of up to 128, from Hopper on."""
        if platform.device.type != "cuda" or torch.cuda.get_device_capability(platform.device)[0] < 9:
            return "it needs an NVIDIA GPU of compute capability 9.0 or more"
        if importlib.util.find_spec("cudnn") is None:
            return "the package nvidia-cudnn-frontend is not installed (octavo[cudnn])"
        if not isinstance(spec, HeadsKV):
            return "it keeps no latent vectors"
        if spec.sliding_window:
            return "it has no sliding window"
        if spec.head_dim % 8 or spec.head_dim > _LARGEST_HEAD:
            return f"it takes heads of up to {_LARGEST_HEAD}, by eights; not of {spec.head_dim}"
        if spec.dtype not in ("bfloat16", "float16"):
            return "it takes a KV cache of 16 bits"
        return None

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last step's sequences."""
        self._of_step.clear()

    def attend(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        singles = batch.num_singles
        if not self._is_for(q[singles:], cache, batch, scores):
            return super().attend(q, cache, tables, batch, scores)
        key = id(tables)
        if key not in self._of_step:
            self._of_step[key] = _sequences(tables, batch, q[0].numel(), cache)
        out = torch.empty_like(q)
        if not self._prefill(q[singles:], cache, self._of_step[key], out[singles:], scores.scale):
            return super().attend(q, cache, tables, batch, scores)
        if singles:
            first = Ragged(cu_q_lens=batch.cu_q_lens[: singles + 1], kv_lens=batch.kv_lens[:singles])
            attend = self.platform.kernels.attention.paged_attention
            out[:singles] = attend(q[:singles], cache, tables.block_tables[:singles], first, scores)
        return out

    def _is_for(self, q: Tensor, cache: Tensor, batch: ForwardBatch, scores: Scores) -> bool:
        return (
            batch.longest_q > 1
            and len(q) > MAX_CAPTURED_TOKENS
            and q.numel() < _MOST_ELEMENTS
            and q.dtype == cache.dtype
            and q.is_contiguous()
            and not scores.soft_cap
            and scores.sinks is None
            and scores.is_causal
        )


def _sequences(tables: GroupTables, batch: ForwardBatch, token_size: int, cache: Tensor) -> Sequences:
    """Return the requests of several new tokens, padded with empty ones; without waiting for the device."""
    first, rows, block_size = batch.num_singles, len(batch.kv_lens) - batch.num_singles, cache.shape[2]
    missing = _rounded(rows) - rows

    def padded(lens: Tensor) -> Tensor:
        return functional.pad(lens, (0, missing)).view(-1, 1, 1, 1)

    q_lens = padded(batch.cu_q_lens[first:].diff())
    starts = functional.pad(q_lens.view(-1).cumsum(0, dtype=torch.int32), (1, 0)) * token_size
    kv_lens = padded(batch.kv_lens[first:])
    blocks = functional.pad(tables.block_tables[first:], (0, 0, 0, missing))
    end = kv_lens.view(-1, 1).long()
    last = blocks.gather(1, (end // block_size).clamp(max=blocks.shape[1] - 1)).long()
    return Sequences(
        _rounded(batch.longest_q),
        q_lens,
        kv_lens,
        starts.view(-1, 1, 1, 1),
        blocks[:, None, :, None],
        torch.where(end % block_size > 0, last, 0),
        (end % block_size + torch.arange(block_size, device=end.device)).clamp(max=block_size - 1),
        cache.new_zeros(()),
    )


def _rounded(number: int) -> int:
    """Return the next power of 4: planning for too many costs little, and each plan 30 to 90 ms."""
    return 1 << ((number - 1).bit_length() + 1) // 2 * 2
