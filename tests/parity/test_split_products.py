"""Products whose sum is left to the next norm, in models: who leaves it, against Hugging Face."""

from dataclasses import replace

import pytest
import torch

from octavo.runtime.kernels.linear import SplitProduct
from octavo.runtime.kernels.norms import PartialSums
from octavo.runtime.kernels.ref.elementwise import add_norm
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.platforms import cpu
from octavo.runtime.quantization import unquantized
from tests.model_driver import load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config


def in_thirds(x, weight):
    """Thirds of the product, the last one first."""
    size = -(-x.shape[1] // 3)
    pairs = zip(x.split(size, 1), weight.split(size, 1), strict=True)
    return PartialSums(torch.stack([part @ matrix.t() for part, matrix in pairs][::-1]))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"])
def test_only_norms_that_add_get_partial_sums(tmp_path, monkeypatch, architecture):
    """In a Gemma another norm stands between, in a Granite a factor."""
    calls = []

    def norm(x, *rest):
        calls.append(len(x.parts))
        return add_norm(x, *rest)

    table = ref_table()
    linear = replace(table.linear, split_product=SplitProduct(in_thirds, norm))
    table = replace(table, linear=linear)
    monkeypatch.setattr(cpu, "cpu_table", lambda threads, snapshot: table)
    monkeypatch.setattr(unquantized, "WidenedLinear", unquantized.DenseLinear)  # as on a GPU
    oracle = make_oracle(tiny_config(architecture))
    prompts = make_prompts(oracle.config.vocab_size)
    model = load(save(oracle, tmp_path))
    for logits, prompt in zip(prompt_logits(model, prompts), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
    assert calls == ([3, 3] * len(model.layers) if architecture == "LlamaForCausalLM" else [])
