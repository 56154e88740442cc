"""The kernels in numpy. Their contracts are the protocols of octavo/runtime/kernels."""

import math

import numpy as np
import torch

from octavo.runtime.kernels.ref import blocks, cache, elementwise


def matmul(x, weight, bias=None):
    y = x.numpy() @ weight.numpy().T
    return torch.from_numpy(y if bias is None else y + bias.numpy())


def gated_matmul(x, weight, bias=None):
    return activate(matmul(x, weight, bias), "silu", gated=True)


def unpacked(matrix, dtype):
    """Unpack a matrix once, after loading: products with float32 are all that numpy is good at."""
    if matrix.scales is not None:
        return matrix
    rows = blocks.block_dequantize(matrix).contiguous()
    return matrix._replace(blocks=rows.view(torch.uint8), type_name="F32", input_precision="float32")


def block_matmul(x, matrix, bias=None, out=None):
    if matrix.type_name != "F32":
        return blocks.block_matmul(x, matrix, bias, out)
    made = matmul(x, matrix.blocks.view(torch.float32), bias)
    return made if out is None else out.copy_(made)


def rms_norm(x, weight, eps):
    wide = x.numpy()
    scale = 1 / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + np.float32(eps))
    return torch.from_numpy(wide * scale * weight.numpy())


def add_norm(x, weight, eps, residual):
    total = torch.from_numpy(x.numpy() + residual.numpy())
    return rms_norm(total, weight, eps), total


def activate(x, activation, *, gated):
    if activation == "gelu":  # numpy has no error function
        return elementwise.activate(x, activation, gated=gated)
    gate, values = np.split(x.numpy(), 2, -1) if gated else (x.numpy(), None)
    if activation == "silu":
        made = gate / (1 + np.exp(-np.clip(gate, -80, None)))
    else:
        made = gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return torch.from_numpy(made if values is None else made * values)


def paged_attention(q, kv_cache, block_tables, batch, scores):
    is_plain = scores.is_causal and scores.sinks is None and not scores.soft_cap and kv_cache.shape[1] == 2
    if not is_plain or kv_cache.dtype == torch.int8:
        return cache.paged_attention(q, kv_cache, block_tables, batch, scores)
    out = torch.zeros(q.shape)
    starts, (_, _, block_size, kv_heads, size) = batch.cu_q_lens.tolist(), kv_cache.shape
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        start, end = starts[request : request + 2]
        if not kv_len or start == end:
            continue
        oldest = kv_len - (end - start)  # the position of the first query
        first = max(0, oldest - scores.sliding_window + 1) if scores.sliding_window else 0
        places = np.arange(first, kv_len)
        places = torch.from_numpy(places // block_size), torch.from_numpy(places % block_size)
        rows = block_tables[request][places[0]].long(), places[1]
        keys, values = (kv_cache[rows[0], half, rows[1]].float().numpy() for half in (0, 1))
        queries = q[start:end].numpy().reshape(end - start, kv_heads, -1, size)
        products = np.einsum("nhgd,khd->hgnk", queries, keys, optimize=True) * scores.scale
        distance = np.arange(oldest, kv_len)[:, None] - np.arange(first, kv_len)
        hidden = distance < 0
        if scores.sliding_window:
            hidden |= distance >= scores.sliding_window
        products[:, :, hidden] = -np.inf
        weights = np.exp(products - products.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        made = np.einsum("hgnk,khd->nhgd", weights, values, optimize=True)
        out[start:end] = torch.from_numpy(made.reshape(end - start, -1, size))
    return out
