"""Writers of quantized matrices, each by its format's specification and none of octavo's code.

A writer takes a matrix [N, K], rounds it to nearest, and returns the tensors of a checkpoint by the last part
of their names, with the matrix that they stand for, in float64. Checked against compressed-tensors 0.20.0
(its unpackers give the same numbers: integers of 2, 3, 4 and 8 bits, E2M1) and bitsandbytes 0.50.2 (its
dequantizer over these tensors: nf4, fp4).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Written(NamedTuple):
    tensors: dict[str, Tensor]
    matrix: Tensor


def round_groups(weight: Tensor, bits: int, groups: Tensor, symmetric: bool, dtype=torch.float16):
    """Codes [N, K], scales and zero points [N, G]."""
    top, (n, g) = 2**bits - 1, (len(weight), int(groups.max()) + 1)
    low, high = torch.zeros(n, g), torch.zeros(n, g)
    for i in range(g):
        part = weight[:, groups == i]
        low[:, i], high[:, i] = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).clamp(min=1e-4).to(dtype)
    zeros = (
        torch.full((n, g), 2.0 ** (bits - 1)) if symmetric else (-low / scales.float()).round().clamp(0, top)
    )
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return codes.int(), scales, zeros.int()


def value(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return scales.double()[:, groups] * (codes - zeros[:, groups])


def bit_stream(codes: Tensor, bits: int) -> Tensor:
    """[rows, K] codes to [rows, words] int32: bit by bit, low ones first."""
    rows, size = codes.shape
    out = torch.zeros(rows, -(-size * bits // 32), dtype=torch.int64)
    for k in range(size):
        for bit in range(bits):
            place = k * bits + bit
            out[:, place // 32] |= ((codes[:, k].long() >> bit) & 1) << (place % 32)
    return torch.where(out >= 2**31, out - 2**32, out).int()


def even(size: int, group: int) -> Tensor:
    return torch.arange(size) // group if group > 0 else torch.zeros(size, dtype=torch.long)


def gptq(weight, bits=4, group=32, symmetric=False, order=None, version=1, dtype=torch.float16) -> Written:
    """order: a permutation of the inputs, by which groups are given out (act-order)."""
    groups = even(weight.shape[1], group)
    if order is not None:
        groups = groups[order.argsort()]
    codes, scales, zeros = round_groups(weight, bits, groups, symmetric, dtype)
    if version == 1:
        zeros = zeros.clamp(min=1)  # zero - 1 is stored
        codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1).int()
    tensors = {
        "qweight": bit_stream(codes, bits).t().contiguous(),
        "qzeros": bit_stream((zeros - int(version == 1)).t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return Written(tensors, value(codes, scales, zeros, groups))


def awq(weight, group=32, columns=AWQ_COLUMNS) -> Written:
    groups = even(weight.shape[1], group)
    codes, scales, zeros = round_groups(weight, 4, groups, False)

    def words(rows: Tensor) -> Tensor:
        return bit_stream(rows.reshape(len(rows), -1, 8)[..., list(columns)].flatten(1), 4)

    tensors = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
    return Written(tensors, value(codes, scales, zeros, groups))


def packed(weight, bits=4, group=32, symmetric=True, order=None, dtype=torch.bfloat16) -> Written:
    """compressed-tensors, pack-quantized."""
    groups = even(weight.shape[1], group)
    if order is not None:
        groups = groups[order.argsort()]
    codes, scales, zeros = round_groups(weight, bits, groups, symmetric, dtype)
    tensors = {
        "weight_packed": bit_stream(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = bit_stream(zeros.t(), bits).t().contiguous()
    if order is not None:
        tensors["weight_g_idx"] = groups.int()
    return Written(tensors, value(codes, scales, zeros, groups))


def blocked(weight, n: int, k: int, top: float) -> Tensor:
    """The scale of every n rows and k columns, 0 = all: [rows / n, columns / k] float32."""
    rows, columns = weight.shape
    n, k = n or rows, k or columns
    parts = [
        [weight[r : r + n, c : c + k].abs().max() for c in range(0, columns, k)] for r in range(0, rows, n)
    ]
    return torch.tensor(parts).clamp(min=1e-5) / top


def spread(scales: Tensor, weight: Tensor, n: int, k: int) -> Tensor:
    rows, columns = weight.shape
    return scales.repeat_interleave(n or rows, 0)[:rows].repeat_interleave(k or columns, 1)[:, :columns]


def fp8(weight, n=1, k=0, name="weight_scale", dtype=torch.float32) -> Written:
    scales = blocked(weight, n, k, 448).to(dtype)
    all_scales = spread(scales.float(), weight, n, k)
    codes = (weight / all_scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = scales.reshape(-1)[0] if not n and not k else scales
    return Written({"weight": codes, name: stored}, codes.double() * all_scales.double())


def int8(weight, n=1, k=0, zero=0, dtype=torch.float32) -> Written:
    scales = blocked(weight, n, k, 120).to(dtype)
    all_scales = spread(scales.float(), weight, n, k)
    codes = (weight / all_scales + zero).round().clamp(-128, 127).to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scales}
    if zero:
        tensors["weight_zero_point"] = torch.full(scales.shape, zero, dtype=torch.int8)
    return Written(tensors, (codes.double() - zero) * all_scales.double())


def exponents(weight: Tensor, size: int, largest: int) -> Tensor:
    top = weight.unflatten(1, (-1, size)).abs().amax(-1).clamp(min=1e-9)
    return (top.log2().floor() - largest + 127).clamp(0, 254).to(torch.uint8)


def mxfp4(weight, shift=0) -> Written:
    """shift: of the exponents' bias, for a twin."""
    scales = exponents(weight, 32, 2)
    factors = (scales.double() - 127).exp2().repeat_interleave(32, 1)
    levels = torch.tensor(E2M1, dtype=torch.float64)
    amounts = ((weight.double() / factors).abs()[..., None] - levels).abs().argmin(-1)
    codes = (amounts + 8 * (weight < 0)).to(torch.uint8)
    matrix = torch.where(weight < 0, -1, 1) * levels[amounts] * factors
    return Written(
        {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales + shift}, matrix
    )


def mxfp8(weight) -> Written:
    scales = exponents(weight, 32, 8)
    factors = (scales.double() - 127).exp2().repeat_interleave(32, 1)
    codes = (weight.double() / factors).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return Written({"weight": codes, "weight_scale": scales}, codes.double() * factors)


def torchao(weight, writer) -> Written:
    """Parts of a tensor under names of their own, as torchao flattens it."""
    tensors, matrix = writer(weight)
    names = {
        "weight": "_weight_qdata",
        "weight_scale": "_weight_scale",
        "weight_zero_point": "_weight_zero_point",
    }
    return Written({names[name]: tensor for name, tensor in tensors.items()}, matrix)


def torchao_int4(weight, group=32, high_first=False) -> Written:
    """As mslk's int4_row_quantize_zp and pack_int4, which Int4Tensor calls.

    Zero points are a number of codes in float16 to kernels: the matrix has them so.
    """
    n, k = weight.shape
    parts = weight.reshape(n, -1, group)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scales = ((high - low).clamp(min=1e-6) / 15).bfloat16().float()
    zeros = (low + 8 * scales).bfloat16().float()
    codes = ((parts - zeros) / scales).round().clamp(-8, 7)
    in_codes = (zeros / scales - 8).half().double() + 8
    assert ((in_codes - zeros.double() / scales.double()).abs() <= 2**-8).all()
    matrix = ((codes.double() + in_codes) * scales.double()).view(n, k)
    nibbles = codes.to(torch.int8).view(n, k) & 15
    first, second = nibbles[:, 0::2], nibbles[:, 1::2]
    packed = second | first << 4 if high_first else first | second << 4
    shared = {"_weight_scale": scales, "_weight_zero_point": zeros}
    tensors = {name: table.squeeze(-1).t().contiguous().bfloat16() for name, table in shared.items()}
    return Written({"_weight_qdata": packed} | tensors, matrix)


def nvfp4(weight, modelopt=False, factor_shift=0) -> Written:
    """By compressed-tensors: factors are stored times the matrix's own number; ModelOpt: it divides them."""
    n, k = weight.shape
    own = (weight.abs().max() / (6 * 448)).float()
    parts = weight.view(n, -1, 16)
    factors = (parts.abs().amax(-1) / 6 / own).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scales = factors.double() * own.double()
    levels = torch.tensor(E2M1 + tuple(-level for level in E2M1))
    codes = (parts.double() / scales[..., None] - levels[:, None, None, None].double()).abs().argmin(0)
    matrix = (scales[..., None] * levels[codes].double()).view(n, k)
    codes = codes.view(n, k)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if modelopt:
        tensors = {"weight": packed, "weight_scale": factors, "weight_scale_2": own}
    else:
        tensors = {"weight_packed": packed, "weight_scale": factors, "weight_global_scale": (1 / own).view(1)}
        matrix = (factors.double() / (1 / own).double())[..., None] * levels[codes.view(n, -1, 16)].double()
    return Written(tensors, matrix.view(n, k))


def hqq(weight, bits=4, group=64, order=None) -> Written:
    """order: of the parts that lie over each other; hqq's own has the first in the highest bits."""
    n, k = weight.shape
    size = group if group > 0 else k
    table = weight.reshape(-1, size)
    low, high = table.amin(1, keepdim=True), table.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half()
    zero = (-low / scale.float()).half()
    codes = (table / scale.float() + zero.float()).round().clamp(0, 2**bits - 1).int()
    matrix = ((codes.double() - zero.double()) * scale.double()).view(n, k)
    parts = {8: 1, 4: 2, 3: 10, 2: 4}[bits]
    padded = torch.cat([codes, codes.new_zeros(-len(codes) % parts, size)])
    packed = torch.zeros(len(padded) // parts, size, dtype=torch.int32)
    for i, part in enumerate(padded.chunk(parts)):
        packed |= part << bits * ((parts - 1 - i) if order is None else order[i])
    packed = packed if bits == 3 else packed.to(torch.uint8)
    return Written({"W_q": packed, "scale": scale, "zero": zero, "nbits": torch.tensor(bits)}, matrix)


def levels_of(kind: str) -> Tensor:
    """bitsandbytes' own tables, as its library prints them."""
    if kind == "fp4":
        amounts = torch.tensor([0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25])
        return torch.cat([amounts, -amounts])
    ends = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
    ends += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
    ends += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    return torch.tensor([*ends, 0.7229568362236023, 1.0])


def bnb4(weight, kind="nf4", nested=False) -> Written:
    table, state = levels_of(kind), {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape)}
    blocks = weight.reshape(-1, 64)
    tops = blocks.abs().amax(1).clamp(min=1e-6)
    tensors = {"weight.quant_map": table}
    if nested:
        offset, codebook = float(tops.mean()), torch.linspace(-1, 1, 256)
        rest = tops - offset
        padded = nn.functional.pad(rest, (0, -len(rest) % 256)).view(-1, 256)
        highest = padded.abs().amax(1)
        ids = (rest[:, None] / highest.repeat_interleave(256)[: len(rest), None] - codebook).abs().argmin(1)
        tops = codebook[ids] * highest.repeat_interleave(256)[: len(rest)] + offset
        tensors |= {"weight.absmax": ids.to(torch.uint8), "weight.nested_absmax": highest}
        tensors |= {"weight.nested_quant_map": codebook}
        state |= {"nested_blocksize": 256, "nested_offset": offset}
    else:
        tensors["weight.absmax"] = tops
    codes = (blocks[..., None] / tops[:, None, None] - table).abs().argmin(-1)
    flat = codes.flatten().to(torch.uint8)
    tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return Written(tensors, (table.double()[codes] * tops[:, None].double()).view(weight.shape))


def bnb8(weight) -> Written:
    tops = weight.abs().amax(1)
    codes = (weight / tops[:, None] * 127).round().to(torch.int8)
    return Written({"weight": codes, "SCB": tops}, codes.double() * tops[:, None].double() / 127)


def write_checkpoint(oracle: PreTrainedModel, folder: Path, config: dict[str, Any], choose) -> Path:
    """Save `oracle` with its linear layers as `choose(name)` writes them (None: as they are), and give it the
    numbers that they stand for."""
    tensors = {}
    for name, module in oracle.named_modules():
        writer = choose(name) if isinstance(module, nn.Linear) else None
        if writer is not None:
            written = writer(module.weight.detach().float())
            module.weight.data = written.matrix.float()
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in written.tensors.items()}
    stored = {name.rpartition(".")[0] for name in tensors}
    for name, tensor in oracle.state_dict().items():
        if name not in tensors and not (name.endswith(".weight") and name.removesuffix(".weight") in stored):
            tensors[name] = tensor.detach().clone()
    if oracle.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    saved = oracle.config.to_dict() | {
        "quantization_config": config,
        "architectures": [type(oracle).__name__],
    }
    (folder / "config.json").write_text(json.dumps(saved, default=str))
    return folder
