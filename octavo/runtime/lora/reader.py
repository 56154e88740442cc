"""Reads an adapter, as PEFT saves it, into what it changes of this rank's matrices.

Called by the pool, on any thread: nothing here computes with the model. Names follow the model's weight map,
so a checkpoint's q, k and v become parts of our one matrix, and rows stand in our order.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import RequestError, Unsupported
from octavo.config.gguf_adapter import is_gguf
from octavo.config.lora import PeftConfig
from octavo.messages.adapters import AdapterPart, AdapterRef
from octavo.runtime.kernels.adapters import LowRank
from octavo.runtime.lora.expert_tensors import Pairs, join_pairs, name_of, read_pairs
from octavo.runtime.lora.files import open_part
from octavo.runtime.lora.sites import EMBEDDING, ENCODER, HEAD, Site, Sites
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import Target, WeightMap, transpose
from octavo.runtime.quantization.arena import Arena

_LARGE_PAGE = 2 << 20


@dataclass
class Adapter:
    """What a sum of adapters changes, by name of the site.

    magnitudes: [N] float32 of DoRA, 0 for outputs without one; they become factors when first used
    replaced:   [rank] rows of this rank's matrix that the change holds anew, -1 for other ranks'; what the
                base has in them is subtracted when first used
    biases:     [N] float32 in place of the base's, NaN where that stays; likewise
    """

    changes: dict[str, LowRank] = field(default_factory=dict)
    wholes: dict[str, Tensor] = field(default_factory=dict)
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> "Adapter":
        """Return it on `device`, in copies that the host does not wait for."""
        changes = {name: change.on(device) for name, change in self.changes.items()}
        wholes = {name: whole.to(device, non_blocking=True) for name, whole in self.wholes.items()}
        return Adapter(changes, wholes)

    def pack(self) -> "Adapter":
        """Bring it to large pages if it fills one, as steps read all of it; return it."""
        if sum(change.down.nbytes + change.up.nbytes for change in self.changes.values()) >= _LARGE_PAGE:
            arena = Arena()
            for name, change in sorted(self.changes.items()):  # files have them in any order
                self.changes[name] = change._replace(down=arena.copy(change.down), up=arena.copy(change.up))
        return self


@dataclass
class _Draft:
    """What is added up for one site: pairs (down, up) by part of the product; "" is all of them."""

    pairs: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    experts: Pairs = field(default_factory=lambda: defaultdict(list))
    initial: dict[str, tuple[str, int, float]] = field(default_factory=dict)
    """By part, where training began with some of the base: how that was found, its rank and scale."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """`bias` and `magnitude`, [N] float32, 0 = none; `own_bias`, NaN = none."""


class _Source(NamedTuple):
    """An adapter that is read, its config, whether it is alone and unscaled, and a GGUF file."""

    part: AdapterPart
    config: PeftConfig
    is_plain: bool
    has_file: bool

    def check(self, found: dict[str, Tensor], site: Site, name: str, origin: str) -> None:
        """Raise RequestError for what this kind of adapter cannot change, and for what its config denies."""
        rank = self.config.rank_of(name)
        if "down" in found and len(found["down"]) != rank and not self.has_file:
            text = f"{origin}.lora_A has rank {len(found['down'])}, the adapter's config says {rank}."
            raise RequestError(text, "lora_path")
        if self.config.uses_dora and "down" in found and "magnitude" not in found:
            raise RequestError(f"{origin}: use_dora, but there is no lora_magnitude_vector.", "lora_path")
        is_layer = site.name not in (HEAD, EMBEDDING) and not site.name.startswith(ENCODER)
        if not is_layer and (self.config.invocation or self.has_file):
            text = "activated adapters and those of GGUF files change layers of the text model only"
            raise RequestError(f"{origin}: {text}.", "lora_path")
        kinds = {"magnitude": "DoRA", "whole": "modules_to_save", "rows": "trainable_token_indices"}
        kinds |= {"own_bias": "a trained bias"}
        kind = self.config.residual or next((kinds[key] for key in kinds if key in found), "")
        if not self.is_plain and kind:
            raise RequestError(f"{origin}: {kind} cannot be scaled or added to others.", "lora")


class AdapterReader:
    """Reads adapters for one model, or a stage of it. rank 0 adds what no rank may repeat"""

    def __init__(
        self,
        sites: Sites,
        model: Family,
        arch: Arch,
        allowed: list[str],
        rank: int,
        *,
        is_split: bool = False,
    ) -> None:
        """is_split: over several ranks"""
        self.sites, self._arch, self._allowed, self._rank = sites, arch, allowed, rank
        self._model, self._is_split = model, is_split

    def read(self, ref: AdapterRef) -> Adapter:
        """Return the sum of a ref's adapters. Raises RequestError, which names what is at fault."""
        adapter, drafts = Adapter(), defaultdict[str, _Draft](_Draft)
        self.sites.note_biases(self._model)
        for part in ref.parts:
            config, modules = open_part(part)
            has_file = is_gguf(Path(part.path))
            source = _Source(part, config, len(ref.parts) == 1 and part.scale == 1.0, has_file)
            weights = self._model.GGUF_WEIGHTS if has_file else self._model.WEIGHTS
            for module, found in modules.items():
                origin = f"{part.path}: {module}"
                name = name_of(module, found, self.sites, weights)
                if (place := self._find(name, origin, weights)) is None:
                    continue
                site, target = place
                if "whole" in found:
                    source.check(found, site, name, origin)
                    adapter.wholes[site.name] = self._whole(found.pop("whole"), site, target, origin)
                if "rows" in found:
                    source.check(found, site, name, origin)
                    self._read_rows(adapter, drafts, found, config.tokens_of(name), place, origin)
                elif found:
                    self._read(drafts[site.name], found, site, target, source, name, origin)
        self._add_up(adapter, drafts)
        return adapter if self.sites.is_on_gpu else adapter.pack()

    def _add_up(self, adapter: Adapter, drafts: dict[str, _Draft]) -> None:
        """Put the sums of the drafts, by site, into an adapter. Raises RequestError."""
        for name, draft in drafts.items():
            site = self.sites.at(name)
            if site.method is None:
                if draft.experts:  # else other ranks have them
                    adapter.changes[name] = self._kept(*join_pairs(draft.experts, site), None, site)
                continue
            change = self._join(draft, site)
            if name in adapter.replaced and change.rank != len(adapter.replaced[name]):
                text = "trainable_token_indices cannot be added to other changes of the same matrix"
                raise RequestError(f"{name}: {text}; merge the adapter.", "lora_path")
            adapter.changes[name] = self._without(draft.initial, change, site) if draft.initial else change
            for kind, vectors in ("magnitude", adapter.magnitudes), ("own_bias", adapter.biases):
                if kind in draft.vectors:
                    vectors[name] = draft.vectors[kind]

    def _read(
        self,
        draft: _Draft,
        found: dict[str, Tensor],
        site: Site,
        target: Target,
        source: "_Source",
        name: str,
        origin: str,
    ) -> None:
        """Add the tensors of one module, known as `name`, to the draft of its site."""
        factor, scaling = source.part.scale, source.config.scaling
        if site.method is None:
            for key, (down, up) in read_pairs(found, self.sites, site, target, self._arch, origin):
                draft.experts[key].append((down, up * factor * scaling(name, len(down))))
            return
        source.check(found, site, name, origin)
        scale = factor * scaling(name, len(found.get("down", [0])))
        self._take(draft, found, site, target, scale, origin)
        if source.config.residual:
            draft.initial[target.shard] = source.config.residual, len(found["down"]), scale

    def _read_rows(
        self,
        adapter: Adapter,
        drafts: dict[str, _Draft],
        found: dict[str, Tensor],
        tokens: list[int],
        place: tuple[Site, Target],
        origin: str,
    ) -> None:
        """Read rows in place of those of `tokens` as a change of their number's rank; of a tied head, too."""
        site, target = place
        outputs, inputs = site.layout.full_shape(site.layout.shards)
        is_wrong = found["rows"].shape != (len(tokens), inputs) or max(tokens, default=outputs) >= outputs
        if len(found) > 1 or site.name not in (HEAD, EMBEDDING) or is_wrong:
            text = f"trainable_token_indices may replace rows of the embedding or head, {inputs} wide, below"
            raise RequestError(f"{origin}: {text} {outputs}, and be all that changes them.", "lora_path")
        is_tied = site.name == EMBEDDING and self.sites.at(HEAD).method is site.method
        ids, chosen = torch.tensor(tokens), torch.zeros(len(tokens), outputs)
        chosen[torch.arange(len(ids)), ids] = 1.0
        for own in [site, self.sites.at(HEAD)] if is_tied else [site]:
            down, up = (chosen, found["rows"]) if own.name == EMBEDDING else (found["rows"], chosen)
            self._take(drafts[own.name], {"down": down, "up": up.T}, own, target, 1.0, origin)
            (shard,) = own.layout.shards
            is_own = (ids >= shard.start) & (ids < shard.start + shard.size)
            adapter.replaced[own.name] = torch.where(is_own, ids - shard.start, -1)

    def _find(self, module: str, origin: str, weights: WeightMap) -> tuple[Site, Target] | None:
        """Return the site of a module of the checkpoint, and how its rows come to ours; None: elsewhere."""
        last = module.rpartition(".")[2]
        if self._allowed and last not in self._allowed:
            allowed = ", ".join(self._allowed)
            raise RequestError(f"{origin}: lora_target_modules allows only {allowed}.", "lora_path")
        target = weights.find(f"{module}.weight")
        if target is not None and self._model.is_elsewhere(target.module):
            return None
        site = None
        if target is not None:
            site = self.sites.find(target.module.removesuffix(".weight").removesuffix(".weight"))
        is_of_encoder = target is not None and target.module.startswith(ENCODER)
        if site is None and is_of_encoder and weights.ignores(f"{module}.weight"):
            return None  # a layer behind the last whose outputs are read
        if target is None or site is None:
            text = "this model has no such matrix that an adapter can change; norms stay the base's, too"
            raise RequestError(f"{origin}: {text}.", "lora_path")
        return site, target

    def _without(self, initial: dict[str, tuple[str, int, float]], change: LowRank, site: Site) -> LowRank:
        """Return a change less what the base lost to the adapter when its training began."""
        kind, *_ = next(iter(initial.values()))

        def refused(text: str) -> RequestError:
            return RequestError(f"{site.name}: {kind}{text}. Convert the adapter to plain LoRA.", "lora_path")

        lost = ": what the base lost cannot be known of"
        if site.name in (HEAD, EMBEDDING) or site.method is None or self._is_split:
            raise refused(f"{lost} embeddings, heads, and with several ranks")
        try:
            matrix = site.method.matrix().float()
        except Unsupported as error:
            raise refused(f"{lost} a quantized one") from error
        bounds = site.table.kept_bounds if change.parts > 1 else (0, site.table.num_outputs)
        names = [shard.name for shard in site.layout.shards] if change.parts > 1 else [next(iter(initial))]
        if initial.keys() - {*names}:
            raise refused(" of a matrix that is kept in parts")
        most = max(rank for _, rank, _ in initial.values())
        downs = change.down.float().view(change.parts, -1, matrix.shape[1])
        first, up = torch.zeros(change.parts, most, matrix.shape[1]), torch.zeros(most, bounds[-1])
        for i, (name, (begin, end)) in enumerate(zip(names, pairwise(bounds), strict=True)):
            if name in initial:
                _, rank, _ = initial[name]
                a, b = _first_part(matrix[begin:end], *initial[name])
                first[i, :rank], up[:rank, begin:end] = a.cpu(), -b.T.cpu()
        down = torch.cat([downs, first], 1).flatten(0, 1)
        return self._kept(down, torch.cat([change.up.float(), up]), change.parts, None, site)

    def _kept(self, down: Tensor, up: Tensor, parts: int, bias: Tensor | None, site: Site) -> LowRank:
        """Return a change of the host pool. Raises RequestError for too large a rank."""
        if self.sites.is_on_gpu and up.shape[-2] > site.table.most_rank:
            text = f"the ranks of all adapters together, {up.shape[-2]}, exceed max_lora_rank"
            raise RequestError(f"{site.name}: {text}.", "lora")
        kept = self.sites.kept
        down, up = (kept(tensor.to(self.sites.dtype).contiguous()) for tensor in (down, up))
        return LowRank(down, up, parts, None, None if bias is None else kept(bias))

    def _whole(self, tensor: Tensor, site: Site, target: Target, origin: str) -> Tensor:
        layout = site.layout
        expected = layout.full_shape(layout.shards)
        if tuple(tensor.shape) != expected or target.shard or len(layout.shards) > 1:
            raise RequestError(
                f"{origin}.weight has shape {list(tensor.shape)}, the model's {list(expected)}: "
                "modules_to_save may hold whole matrices of the same shape.",
                "lora_path",
            )
        ((_, part),) = layout.cut(target.convert(tensor, self._arch), layout.shards)
        assert isinstance(part, Tensor)
        return self.sites.kept(part.to(self.sites.dtype).contiguous())

    def _take(
        self, draft: _Draft, found: dict[str, Tensor], site: Site, target: Target, scale: float, origin: str
    ) -> None:
        if found.keys() == {"own_bias"}:
            _, inputs = site.layout.full_shape(site.layout.select(target.shard))
            found |= {"down": torch.zeros(1, inputs), "up": torch.zeros(len(found["own_bias"]), 1)}
        if not {"down", "up"} <= found.keys():
            raise RequestError(f"{origin} has only one of lora_A and lora_B.", "lora_path")
        down, up, shards = found["down"].float(), found["up"].float(), site.layout.select(target.shard)
        down, up = self._fitting(down, up.flatten(1), site, target, origin)
        zeros = torch.zeros(len(up))
        if site.name == EMBEDDING:
            if len(found) > 2:
                raise RequestError(f"{origin}: embeddings take plain LoRA only.", "lora_path")
            ((_, start, size),) = (shard[1:] for shard in shards)
            draft.pairs[""].append((down.narrow(1, start, size), up * scale))
            return
        bias = found.get("bias", zeros).float() * scale
        magnitude = found["magnitude"].float().view(-1) if "magnitude" in found else zeros
        own_bias = found.get("own_bias", zeros).float()
        if "own_bias" in found and (own_bias.shape != zeros.shape or site.name not in self.sites.biases):
            text = f"has shape {list(own_bias.shape)}; the model has none of that shape"
            raise RequestError(f"{origin}.bias {text}.", "lora_path")
        columns = torch.cat([up * scale, own_bias[:, None], bias[:, None], magnitude[:, None]], 1)
        if target.transform is not transpose:
            moved = target.convert(columns, self._arch)
            columns = moved if moved.shape[1] == columns.shape[1] else columns  # type: ignore[assignment]  # rows move
        if site.layout.split_axis == 1:
            ((full_size, start, size),) = (shard[1:] for shard in shards)
            down = down.narrow(1, start, size)
            if self._rank and size < full_size:  # a bias is added once
                columns[:, -2], columns[:, -3] = 0, torch.nan
        else:
            parts = torch.split(columns, [shard.full for shard in shards])
            kept = zip(shards, parts, strict=True)
            columns = torch.cat([part.narrow(0, shard.start, shard.size) for shard, part in kept])
        names = [shard.name for shard in shards] if target.shard else [""]
        sizes = [shard.size for shard in shards] if target.shard else [len(columns)]
        for name, part in zip(names, torch.split(columns[:, :-3], sizes), strict=True):
            draft.pairs[name].append((down, part))
        bounds = site.table.kept_bounds
        first = [shard.name for shard in site.layout.shards].index(shards[0].name)
        rows = slice(bounds[first], bounds[first + len(shards)])
        for kind, column in ("own_bias", -3), ("bias", -2), ("magnitude", -1):
            if kind in found:
                empty = torch.full((bounds[-1],), torch.nan if kind == "own_bias" else 0.0)
                vector = draft.vectors.setdefault(kind, empty)[rows]
                vector.copy_(columns[:, column] + vector.nan_to_num())

    def _fitting(
        self, down: Tensor, up: Tensor, site: Site, target: Target, origin: str
    ) -> tuple[Tensor, Tensor]:
        """Return a pair whose `down` is a matrix as wide as ours. Raises RequestError for another base's."""
        full = site.layout.full_shape(site.layout.select(target.shard))
        outputs, inputs = full[::-1] if site.name == EMBEDDING else full
        filled = up
        if site.name.startswith(ENCODER) and target.transform is not None:
            if down.shape != (len(down), inputs):  # of a convolution, or of a matrix that we fill up
                down = target.convert(down, self._arch)  # type: ignore[assignment]  # plain as it is
            if up.shape != (outputs, len(down)):
                filled = target.convert(up, self._arch)  # type: ignore[assignment]  # as above
        for name, tensor, shape in (
            ("lora_A", down, (len(down), inputs)),
            ("lora_B", filled, (outputs, len(down))),
        ):
            if tuple(tensor.shape) != shape:
                text = f"{list(tensor.shape)}, this model needs {list(shape)}: the adapter is of another base"
                raise RequestError(f"{origin}.{name} has shape {text}.", "lora_path")
        return down, up

    def _join(self, draft: _Draft, site: Site) -> LowRank:
        """Return the draft's pairs as one: ranks of a part below each other, parts side by side."""
        names, bounds = [shard.name for shard in site.layout.shards], site.table.kept_bounds
        if set(draft.pairs) == {""} or len(names) == 1:
            pairs = [pair for pairs in draft.pairs.values() for pair in pairs]
            down, up, parts = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1), 1
            down, up = down.T if site.name == EMBEDDING else down, up.T
        else:
            parts = len(names)
            of_parts = [
                [(a, b[bounds[i] : bounds[i + 1]]) for a, b in draft.pairs.get("", ())]
                + draft.pairs.get(name, [])
                for i, name in enumerate(names)
            ]
            rank = max(sum(len(a) for a, _ in pairs) for pairs in of_parts)
            (inputs,) = site.layout.others
            down, up = torch.zeros(parts, rank, inputs), torch.zeros(rank, bounds[-1])
            for i, pairs in enumerate(of_parts):
                start = 0
                for a, b in pairs:
                    down[i, start : start + len(a)] = a
                    up[start : start + len(a), bounds[i] : bounds[i + 1]] = b.T
                    start += len(a)
            down = down.flatten(0, 1)
        return self._kept(down, up, parts, draft.vectors.get("bias"), site)


def _first_part(matrix: Tensor, kind: str, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return what training began with, of a matrix [N, K]: down [rank, K] and up [N, rank].

    The first singular vectors (PiSSA, arXiv:2404.02948), or the first columns of a QR decomposition (OLoRA,
    arXiv:2406.01775).
    """
    if kind == "olora":
        q, r = torch.linalg.qr(matrix)
        return scale * r[:rank], q[:, :rank]
    is_wide = matrix.shape[0] <= matrix.shape[1]
    small = (matrix if is_wide else matrix.T).double()
    vectors = torch.linalg.eigh(small @ small.T).eigenvectors[:, -rank:].float()
    return (vectors.T @ matrix, vectors) if is_wide else (vectors.T, matrix @ vectors)
