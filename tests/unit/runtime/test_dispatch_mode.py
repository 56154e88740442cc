"""A mode over torch's operations, and what it does not import."""

import subprocess
import sys

PROGRAM = """
import sys

import torch

from octavo.runtime.dispatch_mode import DispatchMode

class Names(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func)
        return func(*args, **(kwargs or {}))

with Names():
    torch.empty(3)
print("torch._dynamo" in sys.modules)
"""


def test_it_sees_operations_and_imports_no_compiler():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["aten.empty.memory_format", "False"]
