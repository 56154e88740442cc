"""Compiles the Triton kernels for a card that is not here: `python -m tests.card_compiler CARD [quick]`.

The kernels' own launch code runs, over tensors without values, as it would on that card; what it launches is
compiled to machine code, and what the compiler says it takes is printed as JSON.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget

from octavo.base.cards import CARDS
from tests import offline_triton

NVIDIA = "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"
AMD = "gfx90a", "gfx942", "gfx1100"


def target_of(card):
    """Triton's name of a card."""
    if card.startswith("sm_"):
        return GPUTarget("cuda", int(card.removeprefix("sm_")), 32)
    return GPUTarget("hip", card, CARDS[card].warp_size)


class Compiler(offline_triton.Compiler):
    """Compiles in earnest, each form of a kernel once, `most` forms of each kernel."""

    def __init__(self, target, most):
        super().__init__()
        self.target, self.most, self.compile_really = target, most, triton.compiler.compile
        self.forms = []
        self.asked = Counter()

    def compile(self, src, target=None, options=None, _env_vars=None):
        name = src.fn.__name__
        self.asked[name] += 1
        if self.asked[name] <= self.most:
            form = {
                "kernel": name,
                "constants": {".".join(map(str, k)): str(v) for k, v in src.constants.items()},
            }
            try:
                form |= self.usage(src, options)
            except Exception as error:
                form["error"] = f"{type(error).__name__}: {str(error)[-400:]}"
            self.forms.append(form)
        return super().compile(src)

    def usage(self, src, options):
        """What the compiler says: bytes of shared memory, threads, registers and spilled bytes of each."""
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = self.compile_really(src, target=self.target, options=options)
        meta = kernel.metadata
        used = {"shared": meta.shared, "threads": meta.num_warps * self.target.warp_size}
        if self.target.backend == "hip":
            text = kernel.asm["amdgcn"]
            return used | {
                "registers": _number(r"\.vgpr_count:\s+(\d+)", text)
                + _number(r"\.agpr_count:\s+(\d+)", text),
                "spilled": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text),
            }
        text = log.getvalue()
        return used | {
            "registers": _number(r"Used (\d+) registers", text),
            "spilled": _number(r"(\d+) bytes spill stores", text),
        }


def _number(pattern, text):
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def main(card, *how):
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    quick = "quick" in how
    compiler = Compiler(target_of(card), 1 if quick else 10**6)
    offline_triton.install(setattr, compiler, compiler.target)
    from tests import card_workload  # whose kernels are compiled for that card

    card_workload.run(CARDS[card], quick=quick)
    print(json.dumps(compiler.forms))


if __name__ == "__main__":
    main(*sys.argv[1:])
