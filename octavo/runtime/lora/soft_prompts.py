"""`SoftPromptReader` reads what PEFT's prompt methods have learned: embeddings, or keys and values.

Called by the pool, on any thread. Virtual tokens stand before the prompt's own, at positions from 0 on
(arXiv:2104.08691, 2103.10385, 2303.02861; keys and values: 2101.00190).
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import RequestError
from octavo.config.prompt_tuning import MULTITASK, PREFIX, read_prompt_tuning
from octavo.messages.adapters import SoftPromptRef
from octavo.messages.kv import HeadsKV, KVCacheSpec
from octavo.runtime.distributed.group import Group
from octavo.runtime.lora.files import read_tensors

_LEARNED, _COLUMNS, _ROWS = "prompt_embeddings", "prefix_task_cols", "prefix_task_rows"


class SoftPrompt(NamedTuple):
    """What stands in the place of virtual tokens: one of the two.

    embeds: [N, embedding_size] float32
    heads:  by layer, keys and values: [2, N, num_kv_heads of this rank, head_dim]
    """

    embeds: Tensor | None = None
    heads: list[Tensor] | None = None

    def on(self, device: torch.device) -> "SoftPrompt":
        """Return it on `device`."""
        embeds = None if self.embeds is None else self.embeds.to(device)
        return SoftPrompt(embeds, None if self.heads is None else [part.to(device) for part in self.heads])


class SoftPromptReader:
    """Reads for one model. specs: of all layers; own: those of this stage; tp: the ranks that share heads"""

    def __init__(
        self, embedding_size: int, specs: list[KVCacheSpec], own: range | None, dtype: torch.dtype, tp: Group
    ) -> None:
        self.width, self._specs, self._dtype, self._tp = embedding_size, specs, dtype, tp
        self._own = slice(None) if own is None else slice(own.start, own.stop)

    def read(self, ref: SoftPromptRef) -> SoftPrompt:
        """Return a soft prompt. Raises RequestError, which names what is at fault."""
        folder = Path(ref.path)
        config, tensors = read_prompt_tuning(folder), read_tensors(folder, ref.digest)
        if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise RequestError(f"{folder}: {bad[0]} holds values that are not finite numbers.", "path")
        learned = tensors.get(_LEARNED)
        if learned is None or learned.ndim != 2 or len(learned) != config.num_virtual_tokens:
            shape = None if learned is None else list(learned.shape)
            text = f"prompt_embeddings must have {config.num_virtual_tokens} rows, found {shape}"
            raise RequestError(f"{folder}: {text}.", "path")
        if config.kind == PREFIX:
            return SoftPrompt(heads=self._heads(learned, folder))
        if config.kind == MULTITASK:
            learned = learned * _of_task(tensors, ref.task, folder)
        if learned.shape[1] != self.width:
            raise self._misfit(folder, learned, self.width)
        return SoftPrompt(learned.float().contiguous())

    def _heads(self, learned: Tensor, folder: Path) -> list[Tensor]:
        """Return keys and values by layer, of this rank's heads."""
        specs, (num_tokens, width) = self._specs, learned.shape
        first = specs[0]
        if not all(isinstance(spec, HeadsKV) for spec in specs) or not isinstance(first, HeadsKV):
            raise RequestError(f"{folder}: prefix tuning needs layers that keep keys and values.", "path")
        sizes = {(spec.num_kv_heads, spec.head_dim) for spec in specs if isinstance(spec, HeadsKV)}
        layer = width // (2 * len(specs))
        heads = layer // first.head_dim
        if len(sizes) > 1 or heads * first.head_dim * 2 * len(specs) != width or heads % first.num_kv_heads:
            raise self._misfit(folder, learned, 2 * len(specs) * first.num_kv_heads * first.head_dim)
        parts = learned.view(num_tokens, len(specs), 2, heads, first.head_dim).permute(1, 2, 0, 3, 4)
        start = self._tp.rank * heads // self._tp.size
        own = parts[self._own].narrow(3, start, first.num_kv_heads).to(self._dtype)
        return [part.contiguous() for part in own]

    def _misfit(self, folder: Path, learned: Tensor, width: int) -> RequestError:
        return RequestError(
            f"{folder}: prompt_embeddings has shape {list(learned.shape)}, this model needs [{len(learned)}, "
            f"{width}]: the prompt is of another base.",
            "path",
        )


def _of_task(tensors: dict[str, Tensor], task: int, folder: Path) -> Tensor:
    """Return what a task multiplies the shared prompt by, [N, embedding_size]."""
    if not {_COLUMNS, _ROWS} <= tensors.keys() or not 0 <= task < len(tensors[_COLUMNS]):
        count = len(tensors.get(_COLUMNS, ()))
        raise RequestError(f"{folder}: task {task} is not among the {count} tasks of the prompt.", "task_id")
    return tensors[_COLUMNS][task].float() @ tensors[_ROWS][task].float()
