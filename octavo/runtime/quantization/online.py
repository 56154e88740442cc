"""Plain checkpoints are rounded to fewer bits as they are loaded: vLLM's shorthands, int4 and GGUF's types.

Every rank rounds its own part, to nearest. Embeddings and heads stay as they are, and so do matrices whose
columns a format's blocks do not divide. `quantization_config` says what differs: `linear` and `moe` name a
rounding for each kind of layer, or `targets` one by module or pattern; what `ignore` has stays plain.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.experts import make_block_experts
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme, Sources, Storage
from octavo.runtime.quantization.parameter import BlockParameter, Layout, Shard
from octavo.runtime.quantization.roundings import PACKERS
from octavo.runtime.quantization.stored_config import compiled, is_excluded
from octavo.runtime.quantization.unquantized import Unquantized

_KEYS = ("linear", "moe", "ignore", "targets")


class Online(Scheme):
    """Rounds the matrices of safetensors files or dummies."""

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        """See Scheme. Raises ConfigError for a quantization_config that cannot be followed."""
        super().__init__(storage, config, sources)
        self._plain = Unquantized(storage, config, sources)
        name, given = config.model.quantization, config.model.quantization_config
        default = {"online": "", "fp8": "fp8_per_tensor"}.get(name, name)
        self._linear, self._moe = (str(given.get(kind) or default) for kind in ("linear", "moe"))
        self._ignore, self._targets = given.get("ignore") or [], given.get("targets") or {}
        self._check(given)

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        asked = config.model.quantization in ("fp8", *PACKERS) or config.model.quantization_config
        return bool(asked) and Unquantized.matches(config)

    def linear(self, name: str) -> LinearMethod:
        if name.startswith(("embed_", "lm_head")):
            return self._plain.linear(name)
        names = self._roundings(name, self._linear)
        if not any(names.values()):
            return self._plain.linear(name)

        def pack(shard: str, part: Tensor) -> Blocks:
            chosen = names.get(shard, names.get("", ""))
            return PACKERS[chosen](part) if chosen else blocks_of_one(part.contiguous())

        rounds = any(chosen.startswith("fp8") for chosen in names.values())
        return GGUFLinear(self.storage, partial(PackingParameter, pack), rounds_inputs=rounds)

    def experts(self, name: str) -> ExpertsMethod:
        """See Scheme.experts; all experts of a layer are rounded alike."""
        names = {*self._roundings(f"{name}.up", self._moe).values()}
        names |= {*self._roundings(f"{name}.down", self._moe).values()}
        if len(names) > 1:
            raise ConfigError(f"quantization_config: all experts of {name} need one rounding, not {names}.")
        (chosen,) = names
        if not chosen:
            return self._plain.experts(name)
        pack = partial(PackingParameter, lambda _, part: PACKERS[chosen](part))
        return make_block_experts(self.storage, pack, rounds_inputs=chosen.startswith("fp8"))

    def router(self, name: str) -> LinearMethod:
        """Keep routers as they are: another choice of experts changes everything behind it."""
        return self._plain.linear(name)

    def _roundings(self, name: str, default: str) -> dict[str, str]:
        """Return the rounding of each shard of our matrix `name`, "" = none."""
        modules = {shard.rpartition(".")[2]: at.replace("*", "0") for shard, at in self.sources(name).items()}
        return {
            shard: self._rounding_of(module, default) for shard, module in (modules or {"": name}).items()
        }

    def _rounding_of(self, module: str, default: str) -> str:
        if is_excluded(module, self._ignore):
            return ""
        if not self._targets:
            return default
        return next((name for pattern, name in self._targets.items() if is_excluded(module, [pattern])), "")

    def _check(self, given: dict[str, object]) -> None:
        if unknown := sorted(given.keys() - set(_KEYS)):
            raise ConfigError(f"quantization_config has no {unknown}; it has {', '.join(_KEYS)}.")
        if self._targets and ("linear" in given or "moe" in given):
            raise ConfigError("quantization_config: give targets, or linear and moe, not both.")
        for pattern in (*self._ignore, *self._targets):
            if pattern.startswith("re:"):
                compiled(pattern[3:])
        names = (*self._targets.values(), self._linear, self._moe)
        if wrong := sorted({name for name in names if name and name not in PACKERS}):
            raise ConfigError(f"quantization_config: {wrong} must be of {', '.join(sorted(PACKERS))}.")


class PackingParameter(BlockParameter):
    """Packs what is loaded. pack: takes the shard's name and its numbers"""

    def __init__(self, pack: Callable[[str, Tensor], Blocks], layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self._pack = pack

    def _keep(self, shard: Shard, part: Tensor | Blocks) -> int:
        return super()._keep(shard, self._pack(shard.name, part) if isinstance(part, Tensor) else part)
