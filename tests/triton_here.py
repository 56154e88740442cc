"""Where the Triton kernels run in these tests: on the GPU if there is one, else in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET, which conftest sets before anything imports Triton.
"""

import pytest
import torch

interpreter = pytest.importorskip(
    "triton.runtime.interpreter", reason="needs the package triton: pip install triton"
)
HAS_GPU = torch.cuda.is_available()
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor, *scope):
    """NumPy 2.4 makes no number of an array of one element, which the interpreter's loop bounds are."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._patch_lang_tensor = _patch_tensor_and_index

DEVICE = "cuda" if HAS_GPU else "cpu"
