"""Turns a transformers model into a GGUF file as llama.cpp's converter does, guided by the `gguf` package.

Names come from the package's own table and blocks from its quantizer, so nothing here is shared with octavo's
loader. Source of the three changes of layout: convert_hf_to_gguf.py of https://github.com/ggml-org/llama.cpp.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.gguf_writer import ARRAY, FLOAT32, INT32, STRING, UINT32, Entry, Tensor, gguf_bytes

MIXED = {"attn_v": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "Q4_0", "token_embd": "Q8_0", "output": "F16"}
"""As real files do: types that differ within a merged projection."""

_HEAD = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length": "v_head_dim",
}


def write_gguf(
    oracle: PreTrainedModel,
    path: Path,
    types: dict[str, str],
    default: str = "F32",
    entries: Iterable[Entry] = (),
    left_out: str = "-",
) -> Path:
    """Write the model, matrices in `types` (by tensor) or `default`; the oracle gets the rounded weights.

    Keys and values of latent heads are two tensors if `types` has attn_k_b.

    entries: metadata beside the sizes; left_out: tensors of that name are
    """
    architecture, names = _names(oracle)
    is_split = "attn_k_b" in types
    rows, data = [], bytearray()
    tensors = _tensors(oracle)
    for name, parameter in _split_heads(oracle, tensors) if is_split else tensors:
        if name.startswith("pooler.") or left_out in name:  # which embedders do not need
            continue
        stem = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = _to_gguf(architecture, oracle, name, parameter).contiguous().numpy()
        own = types.get(stem.split(".")[-2], default)
        is_matrix = values.ndim > 1 and not stem.endswith(("ffn_gate_inp.weight", ".bias"))
        kind = own if is_matrix else "F32"
        quantization = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(values, quantization)
        rows.append(Tensor(stem, values.shape[::-1], int(quantization), len(data)))
        data += raw.tobytes() + bytes(-raw.nbytes % 32)
        rounded = torch.from_numpy(np.copy(gguf.quants.dequantize(raw, quantization))).view(values.shape)
        parameter.copy_(_from_gguf(architecture, oracle, name, rounded))
    for name, divisors in _rope_divisors(oracle).items():
        rows.append(Tensor(f"{name}.weight", divisors.shape, 0, len(data)))
        data += divisors.numpy().tobytes() + bytes(-divisors.nbytes % 32)
    head = _entries(architecture, oracle)
    if is_split:
        head = _with_split_heads(oracle, head)
    path.write_bytes(gguf_bytes([*head, *entries], rows, bytes(data)))
    return path


def read_gguf(oracle: PreTrainedModel, path: Path) -> None:
    """Give the oracle the weights of a file; each tensor of the file has its place."""
    architecture, names = _names(oracle)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    oracle.tie_weights()
    for name, parameter in _tensors(oracle):
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parameter.copy_(_from_gguf(architecture, oracle, name, torch.from_numpy(np.array(values))))
    assert tensors.keys() <= {"rope_freqs.weight"}


def _names(oracle: PreTrainedModel) -> tuple[str, gguf.TensorNameMap]:
    """The architecture's name, and the tensors'."""
    model_type = oracle.config.model_type
    own = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
    own |= dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2vl")
    own |= {"qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe"}
    own |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek2")
    architecture = own.get(model_type, model_type.removesuffix("_text"))
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    return architecture, gguf.get_tensor_name_map(key, oracle.config.num_hidden_layers)


def _tensors(oracle: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name; gates and values of experts apart."""
    for name, parameter in oracle.named_parameters():
        data = parameter.detach()
        if oracle.config.model_type == "gpt_oss" and ".experts." in name:
            yield from _of_gpt_oss(name, data)
        elif name.endswith("sinks"):
            yield f"{name}.weight", data
        elif name.endswith("experts.gate_up_proj"):
            for kind, part in zip(("gate", "up"), data.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{kind}_proj.weight"), part
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), data
    for name, bias in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), bias


def _split_heads(
    oracle: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Keys and values of latents as two tensors, keys turned; views, which the oracle's weights follow."""
    for name, data in tensors:
        if "kv_b_proj" not in name:
            yield name, data
            continue
        heads = data.view(oracle.config.num_attention_heads, -1, data.shape[1])
        size = oracle.config.qk_nope_head_dim
        yield name.replace("kv_b", "k_b"), heads[:, :size].transpose(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, size:]


def _with_split_heads(oracle: PreTrainedModel, head: list[Entry]) -> list[Entry]:
    """As the converter writes: one head of keys, the latent, and the sizes of the others by own names."""
    config = oracle.config
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    values = {"head_count_kv": 1, "key_length": latent + rope, "value_length": latent}
    values |= {"key_length_mla": config.qk_nope_head_dim + rope, "value_length_mla": config.v_head_dim}
    own = [(f"deepseek2.attention.{name}", UINT32, value) for name, value in values.items()]
    return [entry for entry in head if entry[0] not in {name for name, *_ in own}] + own


def _of_gpt_oss(name: str, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Its experts have inputs first, and a gate before each value."""
    stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    data = data if kind == "bias" else data.transpose(1, 2)
    if "gate_up" not in stem:
        yield f"{stem}.{kind}", data
        return
    for first, part in enumerate(("gate", "up")):
        yield f"{stem.replace('gate_up', part)}.{kind}", data[:, first::2]


def _entries(architecture: str, oracle: PreTrainedModel) -> list[Entry]:
    config = oracle.config
    entries: list[Entry] = [("general.architecture", STRING, architecture)]
    for theirs, ours in _HEAD.items():
        if isinstance(value := getattr(config, ours, None), int):
            entries.append((f"{architecture}.{theirs}", UINT32, value))
    if architecture == "gpt2":
        entries.append(("gpt2.feed_forward_length", UINT32, 4 * config.hidden_size))
        return [*entries, ("gpt2.attention.layer_norm_epsilon", FLOAT32, config.layer_norm_epsilon)]
    if architecture == "deepseek2":
        entries = [entry for entry in entries if not entry[0].endswith("key_length")]
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
        entries.append((f"{architecture}.attention.key_length", UINT32, size))
        entries.append((f"{architecture}.rope.dimension_count", UINT32, config.qk_rope_head_dim))
        entries.append((f"{architecture}.expert_weights_scale", FLOAT32, config.routed_scaling_factor))
        is_v3 = config.model_type == "deepseek_v3"
        entries.append((f"{architecture}.expert_gating_func", UINT32, 1 + is_v3))
        scale = config.rope_parameters["mscale_all_dim"] / 10
        entries.append((f"{architecture}.rope.scaling.yarn_log_multiplier", FLOAT32, scale))
    if architecture == "bert":
        entries.append(("tokenizer.ggml.token_type_count", UINT32, config.type_vocab_size))
        return [*entries, ("bert.attention.layer_norm_epsilon", FLOAT32, config.layer_norm_eps)]
    entries.append((f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT32, config.rms_norm_eps))
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if sections := rope.get("mrope_section"):
        entries.append((f"{architecture}.rope.dimension_sections", ARRAY, (INT32, [*sections, 0])))
    entries.append((f"{architecture}.rope.freq_base", FLOAT32, rope["rope_theta"]))
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if cap := getattr(config, name, None):
            entries.append((f"{architecture}.{name}", FLOAT32, cap))
    if rotated := rope.get("partial_rotary_factor"):
        size = int(rotated * _head_dim(oracle))
        entries.append((f"{architecture}.rope.dimension_count", UINT32, size))
    if rope["rope_type"] in ("longrope", "yarn"):
        length = rope["original_max_position_embeddings"]
        entries.append((f"{architecture}.rope.scaling.original_context_length", UINT32, length))
    if rope["rope_type"] in ("linear", "yarn"):
        entries.append((f"{architecture}.rope.scaling.type", STRING, rope["rope_type"]))
        entries.append((f"{architecture}.rope.scaling.factor", FLOAT32, rope["factor"]))
    return entries


def _to_gguf(architecture: str, oracle: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        pairs = weight.unflatten(0, (-1, 2, _head_dim(oracle) // 2)).transpose(1, 2)
        return pairs.flatten(0, 2)
    if architecture.startswith("gemma") and "norm" in name:
        return weight + 1
    if architecture == "gpt2" and "c_" in name:
        return weight.t()
    return weight


def _from_gguf(architecture: str, oracle: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        return weight.unflatten(0, (-1, _head_dim(oracle) // 2, 2)).transpose(1, 2).flatten(0, 2)
    if architecture.startswith("gemma") and "norm" in name:
        return weight - 1
    return weight.t() if architecture == "gpt2" and "c_" in name else weight


def _head_dim(oracle: PreTrainedModel) -> int:
    return oracle.config.hidden_size // oracle.config.num_attention_heads


def _rope_divisors(oracle: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Ropes as llama.cpp stores them: Llama 3's as plain frequency / scaled frequency."""
    rope = getattr(oracle.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}": torch.tensor(rope[f"{kind}_factor"]) for kind in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = _head_dim(oracle)
    plain = rope["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
    scaled = next(b for n, b in oracle.named_buffers() if n.endswith("rotary_emb.inv_freq"))
    return {"rope_freqs": plain / scaled}
