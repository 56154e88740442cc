"""Every Triton kernel of the table is lowered for an H200, which needs no device.

The interpreter takes more Python than the compiler.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the package triton: pip install triton")

_LOWER = """
import json, sys
from collections import Counter
import torch, triton
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from tests import offline_triton

offline = offline_triton.install(setattr)
target = offline_triton.Offline().get_current_target()
backend = make_backend(target)
failures, lowered = {}, Counter()


def lower(src, target=target, options=None, _env_vars=None):
    options = backend.parse_options({**(options or {}), **src.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    try:
        src.make_ir(target, options, functions, backend.get_module_map(), context)
        lowered[src.fn.__name__] += 1
    except Exception as error:
        failures[src.fn.__name__] = str(error)
    return offline.compile(src)


triton.compiler.compile = lower
if sys.argv[2:]:
    from octavo.runtime.kernels.triton import blocks
    blocks.unpack.fn.__globals__["_unpack_32"] = len  # no function of kernels

from octavo.runtime.kernels.triton.table import cuda_table
from tests.kernel_cases import CASES, OPS, TRUNCATE_AND_DRAW, run

for op in (*OPS, *TRUNCATE_AND_DRAW) if not sys.argv[2:] else ["block_dequantize"]:
    for case in CASES[op]():
        run(cuda_table(), op, case)
if not sys.argv[2:]:
    from tests.kernels.test_arranged import CASES as ARRANGED, products
    from octavo.runtime.kernels.triton import arranged
    for has_gluon in (arranged.has_gluon, lambda: False):
        arranged.has_gluon = has_gluon
        for shape in ARRANGED:
            products(*shape)
    from tests.kernels.test_latent_prompts import ATTEND, make
    for dtype in (torch.float32, torch.bfloat16):
        prompts = make((5, 70), 4, (128, 64, 128), dtype)
        ATTEND(prompts, prompts.q.new_empty(75, 4, 128))
    from tests.kernels import test_shared_keys as shared
    for kind in shared.KINDS:
        for requests in shared.REQUESTS.values():
            for dtype, group, size in ((torch.float32, 3, 32), (torch.bfloat16, 32, 128)):
                attend = cuda_table().attention.paged_attention
                shared.attended(requests, kind, dtype, attend, group, size)
    cuda_table().attention.merge_parts(torch.empty(2, 3, 5, 8), torch.empty(2, 3, 5), torch.empty(5))
    from tests.kernels import test_adapters
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for sizes in test_adapters.SIZES:
            table, random = test_adapters.make_table(dtype, *sizes)
            x, out = random(300, sizes[0]).to(dtype), random(300, table.num_outputs).to(dtype)
            for count, bias in ((300, None), (300, out[0]), (60, None)):
                slots = torch.ones(count, dtype=torch.int32)
                test_adapters.changed(x[:count], out[:count], slots, table, bias)
            matrix, groups = random(table.num_outputs, sizes[0]).to(dtype), out.new_zeros(1, 17).int()
            test_adapters.TRITON.multiply(x[:1], matrix, out[0], groups, table)
    from tests.kernels import test_replaced
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (table, random), kernels = test_replaced.make_table(dtype, 600, "cpu"), cuda_table().adapters
        x, out, slots = random(20, 48).to(dtype), random(20, 600).to(dtype), torch.ones(20).int()
        for bias in (None, out[0]):
            kernels.replace(x, out, kernels.group(slots, 6), table, bias)
        kernels.change_lookup(slots.long(), x, slots, table, 2.0)
    from tests.kernels.test_changed_experts import ExpertForm, make_call
    for count, dtype in ((1, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32)):
        x, *given, changes = make_call(cuda_table(), torch.ones(count).int(), "cpu")
        cuda_table().experts.block_experts(x.to(dtype), *given, ExpertForm(changes=changes), None)
print(json.dumps([failures, lowered]))
"""


def lower(*arguments):
    """Returns (what failed by kernel, how many forms of each kernel were lowered)."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.child", _LOWER, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_kernel_is_lowered():
    failures, lowered = lower()
    assert failures == {}
    assert lowered["_prefill_kernel"] > 50
    assert lowered["_arranged_kernel"] > 5 and lowered["_few_rows_kernel"] > 5 and lowered["few_rows_kernel"]
    assert lowered["_plain_kernel"] == 2
    assert {"_shrinking_gemv_kernel", "_expand_row_kernel"} <= lowered.keys()
    assert {
        "_group_kernel",
        "_shrink_kernel",
        "_expand_kernel",
        "_divide_kernel",
        "_gates_kernel",
    } <= lowered.keys()
    assert {"_replace_kernel", "_lookup_kernel"} <= lowered.keys()
    assert len(lowered) >= 20


def test_what_only_the_interpreter_can_run_fails():
    failures, _ = lower("broken")
    assert set(failures) == {"_dequantize_kernel"}
