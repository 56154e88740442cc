"""`load_drafter` makes what `speculative_config` asks for, where that has weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.base.registry import Registry, load_named
from octavo.config.engine import EngineConfig
from octavo.config.gguf_adapter import is_gguf
from octavo.config.speculative import CUSTOM, HEADS, HIDDEN_STATES, LOOKUPS, speculation
from octavo.runtime.batch import MAX_CAPTURED_TOKENS
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import Reader, dtype_of, kv_specs, load_own
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.dflash import DFlash
from octavo.runtime.models.draft_heads import OWN_PARTS, DraftHead, Eagle, Eagle3, mtp_of
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.sampling.rejection import Rejection
from octavo.runtime.speculative.block_drafter import BlockDrafter
from octavo.runtime.speculative.draft_model import DraftModel
from octavo.runtime.speculative.drafter import Drafter
from octavo.runtime.speculative.lookup import Lookup
from octavo.runtime.speculative.state_drafter import StateDrafter
from octavo.runtime.speculative.vocabulary import SharedVocabulary

_HEADS: Registry[Callable[[EngineConfig, torch.device, torch.dtype], Drafter]] = Registry(
    "heads",
    {
        "medusa": "octavo.runtime.speculative.heads:MedusaHeads",
        "mlp_speculator": "octavo.runtime.speculative.heads:MLPSpeculator",
    },
)
_BY_STATES: dict[str, type[DraftHead]] = {"eagle": Eagle, "eagle3": Eagle3, "dflash": DFlash}


def load_drafter(
    config: EngineConfig,
    target: Model,
    platform: Platform,
    parallel: ParallelContext,
    read: Reader | None = None,
) -> Drafter | None:
    """Load the drafter; None for none with weights. Raises ConfigError (BadCheckpoint), Unsupported.

    read: where weights come from, if not a file
    """
    wanted = speculation(config.scheduler.speculative_config)
    if wanted is None or wanted.method in LOOKUPS:
        return None
    method, draft, family = wanted.method, config.draft, None
    if not target.has_logits:  # the last stage guesses
        if draft is not None and method not in (*HEADS, CUSTOM):
            if method in HIDDEN_STATES:
                family, draft, _ = _tap(method, config, draft, target)
            target.draft_kv_specs = kv_specs(draft, parallel, family)
        return None
    if draft is None:
        return Lookup(wanted, platform.kernels.steps.chain)
    drafter = _load(method, config, draft, target, platform, parallel.as_one_stage(), read)
    drafter.draws = wanted.draws
    return drafter


def rejection_of(config: Mapping[str, Any]) -> Rejection | None:
    """Return what keeps drafts by their chances, if `speculative_config` asks for that."""
    wanted = speculation(config)
    return Rejection(in_blocks=wanted.rejects == "block") if wanted and wanted.rejects else None


def _load(
    method: str,
    config: EngineConfig,
    draft: EngineConfig,
    target: Model,
    platform: Platform,
    parallel: ParallelContext,
    read: Reader | None,
) -> Drafter:
    if method == CUSTOM:
        return _load_class(config.scheduler.speculative_config["model"], config, target)
    if method in _HEADS:
        dtype = platform.compute_dtype(dtype_of(config.model.dtype))
        return _HEADS.load(method)(config, platform.device, dtype)
    if method not in HIDDEN_STATES:
        if not config.scheduler.speculative_config.get("use_heterogeneous_vocab"):
            return DraftModel(load_own(draft, platform, parallel, read), config)
        shared = SharedVocabulary(config, draft)
        model = load_own(shared.draft, platform, parallel, read or shared.read)
        return DraftModel(model, config, shared.missing.to(platform.device))
    family, draft, ids = _tap(method, config, draft, target)
    head = load_own(draft, platform, parallel, read, family)
    assert isinstance(head, DraftHead) and isinstance(target, Decoder)
    head.attach(target, MAX_CAPTURED_TOKENS + 2 * config.scheduler.max_num_rows, ids)
    return BlockDrafter(head) if isinstance(head, DFlash) else StateDrafter(head)


def _tap(
    method: str, config: EngineConfig, draft: EngineConfig, target: Model
) -> tuple[type[DraftHead], EngineConfig, Tensor | None]:
    """Let the model give what the head reads; return its family, and what `_look` does."""
    if not isinstance(target, Decoder):
        raise Unsupported(f"method={method!r} needs a model that octavo runs by its own code.")
    ids, family = None, _BY_STATES.get(method)
    if family is None:
        family = mtp_of(type(target), config.checkpoint.text_config)
    else:
        draft, ids = _look(draft)
    layers = family.taps(draft.checkpoint.config, len(target.layers))
    if len({layer for layer in layers if 0 <= layer < len(target.layers)}) < len(layers):
        raise ConfigError(f"The head reads layers {layers}; the model has {len(target.layers)}, each once.")
    target.taps = layers
    return family, draft, ids


def _load_class(name: str, config: EngineConfig, target: Model) -> Drafter:
    """Return the user's drafter. Raises ConfigError for a class that is none."""
    module, _, last = name.rpartition(":" if ":" in name else ".")
    kind = load_named(f"{module}:{last}", "speculative_config")
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise ConfigError(f"speculative_config: {name} is not derived from {Drafter.__module__}.Drafter.")
    make: Callable[[EngineConfig, Model], Drafter] = kind
    drafter = make(config, target)
    if drafter.kv_specs and (num_stages := config.parallel.pipeline_parallel_size) > 1:
        raise Unsupported(f"pipeline_parallel_size={num_stages}: {name} has a cache, which needs one stage.")
    return drafter


def _look(draft: EngineConfig) -> tuple[EngineConfig, Tensor | None]:
    """Return the config with what the checkpoint holds; the model's ids of the draft's tokens, if given."""
    names, given = set(), None
    if is_gguf(path := Path(draft.checkpoint.path)):
        raise Unsupported(f"{path}: draft heads are read from folders of safetensors, not from GGUF files.")
    for _, name, tensor in read_tensors(path):
        names.add(name)
        given = tensor if name.removeprefix("model.") == "d2t" else given
    config = dict(draft.checkpoint.config)
    config |= {f"has_{part}": any(f"{part}." in name for name in names) for part in OWN_PARTS}
    ids = None if given is None else given.long() + torch.arange(len(given))
    size, vocab_size = config.get("draft_vocab_size"), draft.checkpoint.vocab_size
    if size and size != vocab_size and (ids is None or len(ids) != size):
        raise BadCheckpoint(f"{path}: draft_vocab_size={size} needs a tensor d2t of as many ids.")
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise BadCheckpoint(f"{path}: d2t names tokens that the vocabulary has not.")
    return replace(draft, checkpoint=replace(draft.checkpoint, config=config)), ids
