"""Compiles kernels for a card that is not here: `python -m tests.card_compiler CARD [MOST [KERNEL …]]`.

TRITON_INTERPRET must be 0. The kernels' own launch code runs, over tensors without values, as it would on
that card. What it launches is compiled to machine code by a process for each core, and a line of JSON says
what it takes.

What a kernel takes depends on its tiles, warps, stages and the bytes of its types, and on what is switched
on; not on the counts, strides and bounds that are constants, too. So of a thousand forms few are compiled:
each tile with each width of its types, and each switch on and off.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import re
import sys

import triton
from triton.backends.compiler import GPUTarget

from octavo.base.cards import CARDS
from octavo.base.cores import usable_cores
from tests import offline_triton

NVIDIA = "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"
AMD = "gfx90a", "gfx942", "gfx1100"


def target_of(card):
    """Triton's name of a card."""
    if card.startswith("sm_"):
        return GPUTarget("cuda", int(card.removeprefix("sm_")), 32)
    return GPUTarget("hip", card, CARDS[card].warp_size)


_SHAPES = "TILE", "WIDTH", "ROWS", "CHUNK", "D_PAD", "N_PAD", "DOT", "TYPE", "KIND", "MODE", "NUM_BYTES"
"""What constants begin with that decide about tiles and types."""


def covering(forms):
    """Return forms that have all traits of `forms` between them, as few as are easily found."""
    traits = [(_traits(*form), form) for form in forms]
    left, chosen = set().union(*(found for found, _ in traits)), []
    while left:
        found, form = max(traits, key=lambda pair: len(pair[0] & left))
        chosen.append(form)
        left -= found
    return chosen


def _traits(src, options):
    """The tile with its types, of which those of 16 bits count as one; and each switch."""
    constants = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}
    types = [*src.signature.values(), *(pair for pair in constants.items() if pair[0].startswith(_SHAPES))]
    how = options.get("num_warps"), options.get("num_stages")
    return {
        (*how, str(types).replace("bf16", "fp16")),
        *((name, value) for name, value in constants.items() if isinstance(value, bool)),
        ("WINDOW", constants.get("WINDOW", 0) > 0),
    }


class Compiler(offline_triton.Compiler):
    """Notes what is to be compiled, each form of a kernel once, and compiles it when asked to."""

    def __init__(self, target):
        super().__init__()
        self.target, self._compile = target, triton.compiler.compile
        self.noted = {}
        """Sources and options by kernel."""

    def compile(self, src, target=None, options=None, _env_vars=None):
        self.noted.setdefault(src.fn.__name__, []).append((src, options))
        return super().compile(src)

    def forms(self, most):
        """Those that cover all, at most so many of each kernel, spread over them."""
        for _, noted in sorted(self.noted.items()):
            forms = covering(noted)
            yield from forms[:: max(1, -(-len(forms) // most))]

    def usage(self, src, options):
        """What a form takes, or why it does not compile."""
        constants = {src.fn.arg_names[path[0]]: str(value) for path, value in src.constants.items()}
        form = {"kernel": src.fn.__name__, "constants": constants}
        try:
            return form | self._compiled(src, options)
        except Exception as error:
            return form | {"error": f"{type(error).__name__}: {str(error)[-400:]}"}

    def _compiled(self, src, options):
        """Bytes of shared memory, threads, and registers and spilled bytes of each, as the compiler says."""
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = self._compile(src, target=self.target, options=options)
        meta = kernel.metadata
        used = {"shared": meta.shared, "threads": meta.num_warps * self.target.warp_size}
        used["stages"] = meta.num_stages
        if self.target.backend == "hip":
            text = kernel.asm["amdgcn"]
            return used | {
                "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
                "spilled": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text),
            }
        return used | {
            "registers": _number(r"Used (\d+) registers", log.getvalue()),
            "spilled": _number(r"(\d+) bytes spill stores", log.getvalue()),
        }


def _number(pattern, text):
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def share_out(works):
    """Call each of them once, in forked processes that take the next when they are done with one."""
    fork = multiprocessing.get_context("fork")
    following = fork.Value("i", 0)

    def take():
        while True:
            with following.get_lock():
                turn, following.value = following.value, following.value + 1
            if turn >= len(works):
                return
            works[turn]()

    children = [fork.Process(target=take) for _ in range(usable_cores())]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert not any(child.exitcode for child in children), "a compiler crashed"


def main(card, most="1000000", *kernels):
    """Print a line for each form; kernels: those to compile, all if none is named."""
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    compiler = Compiler(target_of(card))
    offline_triton.install(setattr, compiler, compiler.target)
    from tests import card_workload  # whose kernels are compiled for that card

    card_workload.run(CARDS[card])
    if kernels:
        compiler.noted = {name: compiler.noted[name] for name in kernels}

    def tell(form):
        print(json.dumps(compiler.usage(*form)), flush=True)

    share_out([functools.partial(tell, form) for form in compiler.forms(int(most))])


if __name__ == "__main__":
    main(*sys.argv[1:])
