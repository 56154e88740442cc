"""Products by the integer kernels of a library, of numbers that are the same everywhere.

`python -m tests.arm64_products LIBRARY OUT.npz`; test_arm64.py compares what two processors write.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from octavo.runtime.kernels.block_types import INTEGER_TYPES, TYPES
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.cpu.table import table_of
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.table import KernelTable

COLUMNS, SIZE, ROWS = 37, 512, (1, 2, 3, 4, 23)
PRECISIONS: tuple[InputPrecision, ...] = ("int8", "int16")


def products(table: KernelTable) -> dict[str, np.ndarray]:
    """Multiply every type that integers may meet by few rows and many."""
    generator, found = np.random.default_rng(1), {}
    for kind in TYPES.values():
        if kind.name not in INTEGER_TYPES:
            continue
        blocks = generator.integers(0, 256, (COLUMNS, SIZE // kind.block, kind.num_bytes), dtype=np.uint8)
        packed = torch.from_numpy(blocks.reshape(COLUMNS, -1))
        for rows in ROWS:
            x = torch.from_numpy(generator.standard_normal((rows, SIZE), dtype=np.float32))
            for precision in PRECISIONS:
                y = table.linear.block_matmul(x, Packed(packed, kind.name, precision))
                found[f"{kind.name} {precision} {rows}"] = y.numpy()
    return found


def main(arguments: list[str]) -> None:
    """Compute them by one thread."""
    np.savez(Path(arguments[1]), **products(table_of(Library(Path(arguments[0])), 1)))


if __name__ == "__main__":
    main(sys.argv[1:])
