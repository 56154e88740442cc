"""Adapters made by PEFT, with weights that show: the oracle of the tests of adapters."""

import copy
import warnings
from pathlib import Path

import peft
import torch

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(base, seed: int = 0, scale: float = 0.2, moves: bool = False, **options):
    """A PEFT model over a copy of `base`, whose LoRA weights are random; moves: so far from the first."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads names that transformers deprecates
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM"} | options)
        model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not value.requires_grad:
                continue
            noise = torch.randn(value.shape, generator=generator)
            if "magnitude" in name:
                value.mul_(1.0 + 0.3 * noise.clamp(-2, 2))
            elif "modules_to_save" in name:
                value.add_(noise, alpha=0.1)
            elif moves:
                value.add_(noise, alpha=scale)
            else:
                value.copy_(scale * noise)
    return model


def save(model, folder: Path) -> str:
    """Save the adapter; returns its folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return str(folder)


def logits(model, ids: list[int]) -> torch.Tensor:
    """What follows each of `ids`, [T, vocab_size]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].float()
