"""Writes vectors as clients want them: numbers, base64 or bytes, of several types, in either byte order."""

import base64
import sys
from typing import Any

import numpy as np

from octavo.base.errors import RequestError
from octavo.serving.pooling.protocol import EmbeddingFormat

_SHORT = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "fp8_e4m3": "u1", "fp8_e5m2": "u1"}


def raw(data: np.ndarray, form: EmbeddingFormat) -> bytes:
    """Return numbers as bytes."""
    dtype, order = form.dtype or "float32", form.order or "native"
    if dtype == "bfloat16":
        data = _bfloat16(data)
    elif dtype.startswith("fp8"):
        data = _fp8(data, 3 if dtype == "fp8_e4m3" else 2)
    big = order == "big" or (order == "native" and sys.byteorder == "big")
    return data.astype(np.dtype(_SHORT[dtype]).newbyteorder(">" if big else "<")).tobytes()


def written(data: np.ndarray, form: EmbeddingFormat) -> Any:
    """Return what stands in JSON: lists of numbers, or base64."""
    if form.encoding == "base64":
        return base64.b64encode(raw(data, form)).decode()
    if form.dtype not in (None, "float32") or form.order not in (None, "native"):
        raise RequestError("embed_dtype and endianness are for base64 and bytes.", "embed_dtype")
    return data.tolist()


def signs(data: np.ndarray, *, signed: bool) -> list[int]:
    """Return the signs of a vector as bits, eight to a number, the first one highest. Raises RequestError."""
    if len(data) % 8:
        raise RequestError(
            f"Embedding types binary and ubinary need a multiple of 8 dimensions, got {len(data)}.",
            "embedding_types",
        )
    packed = np.packbits(data > 0)
    return (packed.astype(np.int16) - 128 if signed else packed).tolist()


def _bfloat16(data: np.ndarray) -> np.ndarray:
    """Round to nearest, to even; as the upper halves of float32."""
    bits = data.view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _fp8(data: np.ndarray, fraction_bits: int) -> np.ndarray:
    """Round to nearest, to even, as torch does; what is too large: 448 (fp8_e4m3), infinity (fp8_e5m2)."""
    codes = np.arange({3: 0x7F, 2: 0x7D}[fraction_bits])
    exponents, fractions = np.divmod(codes, 1 << fraction_bits)
    leading = np.where(exponents, 1 << fraction_bits, 0)
    bias = (1 << (6 - fraction_bits)) - 1 + fraction_bits
    values = np.ldexp((leading + fractions).astype(np.float64), np.maximum(exponents, 1) - bias)
    halves, sizes = (values[1:] + values[:-1]) / 2, np.abs(data).astype(np.float64)
    below, above = np.searchsorted(halves, sizes, "left"), np.searchsorted(halves, sizes, "right")
    nearest: np.ndarray = np.where(below % 2, above, below)  # they differ on a half alone
    nearest |= np.signbit(data) << 7
    return nearest.astype(np.uint8)
