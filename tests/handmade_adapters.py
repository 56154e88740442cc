"""Adapters written without PEFT: random matrices of any rank in a folder, and the model with them merged."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def alpha_of(rank: int) -> float:
    """Return the alpha with which changes are of one size, whatever the rank."""
    return 4.0 * rank**0.5


def write(oracle, folder: Path, rank: int, seed: int, factor: float = 0.2):
    """Write an adapter of all linear layers, as PEFT would; return the oracle with it merged."""
    merged, tensors = copy.deepcopy(oracle), {}
    generator = torch.Generator().manual_seed(seed)
    alpha = alpha_of(rank)
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] not in ALL_LINEAR:
            continue
        outputs, inputs = module.weight.shape
        down, up = (
            factor * torch.randn(*shape, generator=generator) for shape in ((rank, inputs), (outputs, rank))
        )
        tensors |= {f"base_model.model.{name}.lora_{end}.weight": m for end, m in (("A", down), ("B", up))}
        with torch.no_grad():
            module.weight += alpha / rank * (up @ down)
    _save(folder, tensors, rank, ALL_LINEAR)
    return merged


def write_experts(oracle, folder: Path, rank: int, seed: int, factor: float = 0.2):
    """Write an adapter of every expert's matrices, each by itself; return the oracle with it merged."""
    merged, tensors = copy.deepcopy(oracle), {}
    generator = torch.Generator().manual_seed(seed)
    for name, module in merged.named_modules():
        if not name.endswith(".mlp.experts"):
            continue
        for expert, (both, down) in enumerate(
            zip(module.gate_up_proj.data, module.down_proj.data, strict=True)
        ):
            for part, weight in zip(("gate", "up", "down"), (*both.chunk(2), down), strict=True):
                a, b = (
                    factor * torch.randn(size, generator=generator)
                    for size in ((rank, weight.shape[1]), (len(weight), rank))
                )
                weight.add_(b @ a, alpha=alpha_of(rank) / rank)
                stem = f"base_model.model.{name}.{expert}.{part}_proj"
                tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    _save(folder, tensors, rank, ["gate_proj", "up_proj", "down_proj"])
    return merged


def write_tables(oracle, folder: Path, rank: int, saved: tuple[str, ...] = (), factor: float = 0.1):
    """Write an adapter that replaces matrices, or of this rank of the embeddings; return it merged."""
    merged, tensors = copy.deepcopy(oracle), {}
    generator = torch.Generator().manual_seed(rank)
    table = merged.model.embed_tokens.weight.data
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in saved:
            module.weight.data += factor * torch.randn(module.weight.shape, generator=generator)
            tensors[f"base_model.model.{name}.weight"] = module.weight.data.clone()
    if not saved:
        sizes = (rank, len(table)), (table.shape[1], rank)
        down, up = (factor * torch.randn(*size, generator=generator) for size in sizes)
        table += alpha_of(rank) / rank * (up @ down).T
        stem = "base_model.model.model.embed_tokens.lora_embedding"
        tensors |= {f"{stem}_A": down, f"{stem}_B": up}
    _save(folder, tensors, rank, ["embed_tokens"], saved)
    return merged


def _save(folder: Path, tensors, rank: int, modules: list[str], saved: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha_of(rank), "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": [*saved]}))


def write_queries(folder: Path, width: int = 576, layer: int = 0) -> None:
    """Write an adapter of one layer's queries, for a model of this width: the built-in one's."""
    stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
    tensors = {f"{stem}.lora_A.weight": torch.ones(4, width), f"{stem}.lora_B.weight": torch.ones(width, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
