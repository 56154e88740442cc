"""quantization="int8": the weights of llama.cpp's Q8_0, made while an ordinary checkpoint is loaded."""

import gguf
import pytest
import torch

from octavo import LLM
from octavo.base.errors import Unsupported
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_dequantize
from octavo.runtime.quantization.q8_0 import pack
from tests.gguf_models import write_gguf
from tests.model_driver import load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SCALES = (1e-6, 0.02, 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_those_of_another_quantizer(dtype):
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(SCALES).repeat_interleave(100)[:, None]
    matrix = (torch.randn((300, 96), generator=generator) * scale).to(dtype)
    matrix[7, 32:64] = 0
    matrix[8, :64] = torch.arange(-127, 1, 2) / 2  # halves: 0.5 is rounded to 1, -0.5 to -1
    expected = gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    packed = pack(matrix)
    assert packed.type.name == "Q8_0" and packed.shape == (300, 96)
    assert torch.equal(packed.data, torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_blocks_do_not_fit_stay_exact(dtype):
    matrix = torch.randn(4, 48).to(dtype)
    packed = pack(matrix)
    assert torch.equal(block_dequantize(Packed(packed.data, packed.type.name)), matrix.float())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_logits_are_those_of_the_packed_file(tmp_path, architecture):
    """And near those of the weights themselves. Gemma's head is its embedding: packed once, used as both."""
    extra = {"query_pre_attn_scalar": 16, "layer_types": None} if "Gemma" in architecture else {}
    oracle = make_oracle(tiny_config(architecture) | SIZES | extra)
    prompts = make_prompts(oracle.config.vocab_size)
    exact = [oracle_logits(oracle, prompt) for prompt in prompts]
    folder = save(oracle, tmp_path / "folder")
    file = write_gguf(oracle, tmp_path / "tiny.gguf", {}, "Q8_0")
    narrow = prompt_logits(load(folder, quantization="int8"), prompts)
    for ours, theirs, own in zip(narrow, prompt_logits(load(file), prompts), exact, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        assert 1e-3 < (ours - own).norm() / own.norm() < 0.03


def test_only_numbers_can_be_packed(smollm2_path):
    with pytest.raises(Unsupported, match="stored by 'gguf', which does not fit int8"):
        LLM(str(smollm2_path), quantization="int8", skip_tokenizer_init=True)
