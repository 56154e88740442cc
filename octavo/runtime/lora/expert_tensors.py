"""Reads what adapters change of experts: PEFT's tensors of one expert, or of a stack of all of them.

Of a stack (`target_parameters`), `lora_A` has the ranks of one expert below those of another; in `lora_B` the
first ranks of all experts stand side by side, then the second ones.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, RequestError
from octavo.runtime.lora.sites import Site, Sites
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.weights import Target, WeightMap

Pairs = dict[tuple[int, str], list[tuple[Tensor, Tensor]]]
"""Pairs (down [rank, K], up [N, rank]) by expert and part of the product, "gate" or "up"; "" is all of it."""
_STACKS = ("gate_up_proj", "down_proj")


def name_of(module: str, found: dict[str, Tensor], sites: Sites, weights: WeightMap) -> str:
    """Return the name of a module; of one whose stacks have adapters, the stack that `found` fits.

    PEFT wraps the module once for each of its stacks, and their shapes tell them apart.
    """
    stem = module
    while stem.endswith(".base_layer"):
        stem = stem.removesuffix(".base_layer")
    for name in (f"{stem}.{stack}" for stack in _STACKS):
        target = weights.find(name)
        site = None if target is None else sites.find(target.module.removesuffix(".weight"))
        if site is None or site.method is not None or not {"down", "up"} <= found.keys():
            continue
        if (len(found["up"]), found["down"].shape[1]) == _sizes_of(site):
            return name
    return stem


def read_pairs(
    found: dict[str, Tensor], sites: Sites, site: Site, target: Target, arch: Arch, origin: str
) -> Iterator[tuple[tuple[int, str], tuple[Tensor, Tensor]]]:
    """Yield the pairs of this rank's experts, unscaled. Raises RequestError."""
    is_up, count, (owner, ranks) = _is_up(site), site.table.experts, site.layout.owners
    if found.keys() != {"down", "up"} or not sites.can_change_experts:
        text = "experts take plain LoRA only, and none if replicas share them or they move (enable_eplb)"
        raise RequestError(f"{origin}: {text}.", "lora_path")
    down, up = found["down"].float(), found["up"].float()
    outputs, inputs = _sizes_of(site)
    number, _, half = target.shard.partition(".")
    entries = range(int(number), int(number) + 1) if number else range(count * ranks)
    outputs = outputs // 2 if half else outputs
    rank, rest = divmod(len(down), len(entries))
    if down.shape[1:] != (inputs,) or up.shape != (outputs, len(down)) or rest or not rank:
        raise RequestError(
            f"{origin}: lora_A and lora_B have shapes {list(down.shape)} and {list(up.shape)}, this model "
            f"needs [ranks of {len(entries)} experts, {inputs}] and [{outputs}, as many]: the adapter is of "
            "another base.",
            "lora_path",
        )
    downs = down.view(len(entries), rank, inputs)
    ups = up.view(outputs, rank, -1).permute(2, 0, 1).contiguous()
    if is_up and not number:
        ups = ups[:, _order(target, arch, outputs)]
    shard = site.layout.shards[0]
    own = slice(shard.start, shard.start + shard.size)
    for expert, a, b in zip((i - owner * count for i in entries), downs, ups, strict=True):
        if not 0 <= expert < count:
            continue
        if is_up:
            yield (expert, half), (a, torch.cat([rows[own] for rows in b.chunk(1 if half else 2)]))
        else:
            yield (expert, ""), (a[:, own], b)


def join_pairs(pairs: Pairs, site: Site) -> tuple[Tensor, Tensor, int]:
    """Return `down` and `up` of all experts, and how many parts they have. Ranks are multiples of 8."""
    bounds, count = site.table.kept_bounds, site.table.experts
    is_whole = all(not half for _, half in pairs)
    names, cuts = (("",), (0, bounds[-1])) if is_whole else (("gate", "up"), bounds)

    def of_part(expert: int, i: int) -> list[tuple[Tensor, Tensor]]:
        every = [(a, b[cuts[i] : cuts[i + 1]]) for a, b in pairs.get((expert, ""), ())]
        return every + (pairs.get((expert, names[i]), []) if names[i] else [])

    joined = [[of_part(expert, i) for i in range(len(names))] for expert in range(count)]
    rank = max(sum(len(a) for a, _ in part) for parts in joined for part in parts)
    rank += -rank % 8
    inputs = next(iter(pairs.values()))[0][0].shape[1]
    down, up = torch.zeros(count, len(names), rank, inputs), torch.zeros(count, rank, bounds[-1])
    for expert, parts in enumerate(joined):
        for i, (part, (begin, end)) in enumerate(zip(parts, pairwise(cuts), strict=True)):
            start = 0
            for a, b in part:
                down[expert, i, start : start + len(a)] = a
                up[expert, start : start + len(a), begin:end] = b.T
                start += len(a)
    return down.flatten(1, 2), up, len(names)


def _order(target: Target, arch: Arch, outputs: int) -> Tensor:
    """Return which rows of a stack's matrices in the checkpoint ours are: gates, then values."""
    rows = torch.arange(outputs).view(1, -1, 1)
    try:
        converted = target.convert(rows, arch)
    except BadCheckpoint:  # this family has inputs first
        converted = target.convert(rows.transpose(1, 2), arch)
    assert isinstance(converted, Tensor)
    return converted.flatten()


def _is_up(site: Site) -> bool:
    return len(site.table.kept_bounds) == 3


def _sizes_of(site: Site) -> tuple[int, int]:
    full, other = site.layout.shards[0].full, site.layout.others[-1]
    return (2 * full, other) if _is_up(site) else (other, full)
