"""Small random checkpoints, made by transformers: the oracle of the parity tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo.runtime.models.interface import MODELS
from tests import internlm_oracle

internlm_oracle.register()

PROMPT_LENGTHS = (1, 7, 40, 90)
"""Shorter than a block, and longer than every TINY's sliding window."""


def tiny_config(architecture: str) -> dict[str, Any]:
    return dict(MODELS.load(architecture).TINY)


def make_oracle(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits, norms and biases too."""
    rest = {key: value for key, value in config.items() if key != "model_type"}
    full = AutoConfig.for_model(config["model_type"], **rest)
    # Some versions' other attention knows no soft cap.
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # what transformers draws
        oracle = AutoModelForCausalLM.from_config(full, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return oracle


def save(oracle: PreTrainedModel, folder: Path, **options: Any) -> Path:
    oracle.save_pretrained(folder, **options)
    return folder


def make_prompts(vocab_size: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return oracle(torch.tensor([prompt])).logits[0].float()


def oracle_greedy(oracle: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """The most likely token after the prompt and after each token of `output` but the last.

    Equals `output` if and only if the oracle's greedy decoding does, at the price of one forward pass.
    """
    return oracle_logits(oracle, prompt + output[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
