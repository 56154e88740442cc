"""llama.cpp's adapters in one GGUF file: the same change as PEFT's folder that they were converted from."""

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from octavo import RequestError
from octavo.lora.request import LoRARequest
from tests import handmade_adapters
from tests.gguf_models import write_gguf
from tests.gguf_writer import gguf_bytes
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
RANK, ALPHA, HEADS = 4, 8.0, {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
PROMPTS = make_prompts(131, (40, 9))


def convert(folder: Path, config, path: Path, *, pairs: bool = True, **changes) -> str:
    """Write a folder's adapter as llama.cpp's converter does; pairs: rows of q and k as its rope has them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(changes.get("type", "adapter"))
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", changes.get("alpha", ALPHA))
    for name, stored in load_file(folder / "adapter_model.safetensors").items():
        *_, layer, _, module, end, _ = name.split(".")
        if pairs and end == "lora_B" and module in HEADS:
            heads = getattr(config, HEADS[module])
            rows = stored.view(heads, 2, -1, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
        else:
            rows = stored
        values = (rows * changes.get("factor", 1.0)).to(changes.get("kind", torch.float32))
        writer.add_tensor(f"blk.{layer}.{NAMES[module]}.weight.{end.lower()}", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    root = tmp_path_factory.mktemp("gguf")
    merged = handmade_adapters.write(oracle, root / "peft", RANK, seed=1)
    assert handmade_adapters.alpha_of(RANK) == ALPHA
    return oracle, merged, root, save(oracle, root / "base")


def scored(llm, lora):
    outputs = llm.generate(PROMPTS, SCORED, lora_request=[lora, None], use_tqdm=False)
    return list(zip(outputs, logits_of(outputs, 131), strict=True))


@pytest.mark.parametrize("base", ["safetensors", "gguf"])
def test_it_is_the_folder_s(made, base):
    """Over either form of the base; the twin: rows as they stand elsewhere are far off."""
    oracle, merged, root, folder = made
    if base == "gguf":
        folder = write_gguf(oracle, root / "base.gguf", {})
    llm = engine(folder)
    lora = LoRARequest("g", 1, convert(root / "peft", oracle.config, root / f"{base}.gguf"))
    for (output, found), wanted in zip(scored(llm, lora), (merged, oracle), strict=True):
        check(wanted, output, found)
    other = LoRARequest("g", 1, convert(root / "peft", oracle.config, root / "rows.gguf", pairs=False))
    (output, found), _ = scored(llm, other)
    with pytest.raises(AssertionError):
        check(merged, output, found)


def test_what_cannot_be(made, tmp_path):
    oracle, _, root, folder = made
    llm = engine(folder)

    def refused(text, path):
        with pytest.raises(RequestError, match=text):
            llm.add_lora(LoRARequest("g", 1, str(path)))
        with pytest.raises(RequestError, match=text):
            llm.generate(PROMPTS, SCORED, lora_request=LoRARequest("g", 1, str(path)), use_tqdm=False)

    config = oracle.config
    refused("No adapter found", tmp_path / "none.gguf")
    refused("general.type 'model'", convert(root / "peft", config, tmp_path / "a.gguf", type="model"))
    refused("alpha must be above 0", convert(root / "peft", config, tmp_path / "b.gguf", alpha=0.0))
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    refused("No adapter found", tmp_path / "c.gguf")
    (tmp_path / "d.gguf").write_bytes(
        gguf_bytes([("general.type", 8, "adapter"), ("adapter.type", 8, "lora")])
    )
    refused("adapter.lora.alpha", tmp_path / "d.gguf")
    nan = convert(root / "peft", config, tmp_path / "e.gguf", factor=float("nan"))
    with pytest.raises(RequestError, match="not finite"):
        llm.add_lora(LoRARequest("g", 1, nan))
    shutil.copy(convert(root / "peft", config, tmp_path / "f.gguf"), tmp_path / "g.gguf")
    assert llm.add_lora(LoRARequest("g", 1, str(tmp_path / "g.gguf")))
