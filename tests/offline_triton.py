"""Triton without a device: kernels are not compiled, only counted, and their launches too."""

import threading
from collections import Counter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

H200 = GPUTarget("cuda", 90, 32)


class Offline(DriverBase):
    """A GPU that nobody asks for anything but its kind."""

    def __init__(self, target=H200):
        """No library is looked for."""
        self._target = target

    @classmethod
    def is_active(cls):
        return True

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty):
        return ty


class Compiler:
    """In the place of triton.compiler.compile."""

    def __init__(self):
        self.compiled, self.launched = Counter(), Counter()
        """By the name of the function."""
        self.by_thread = Counter()
        self.failing = 0
        """So many of the next compilations fail."""
        self._lock = threading.Lock()

    def compile(self, src, target=None, options=None, _env_vars=None):
        with self._lock:
            if self.failing:
                self.failing -= 1
                raise RuntimeError("no compiler today")
            self.compiled[src.fn.__name__] += 1
            self.by_thread[threading.current_thread().name.rstrip("_0123456789")] += 1
        return _Kernel(src, self)


class _Kernel:
    """As much of a CompiledKernel as launching one takes."""

    function = packed_metadata = None

    def __init__(self, src, compiler):
        self.src, self._compiler = src, compiler
        self.is_loaded = False

    def launch_metadata(self, *arguments):
        return None

    @property
    def run(self):
        self.is_loaded = True
        return self._launch

    def _launch(self, *arguments):
        self._compiler.launched[self.src.fn.__name__] += 1


def install(setattr_, compiler=None, target=H200):
    """Let Triton take both; `setattr_` as monkeypatch's. Returns the compiler."""
    compiler = compiler or Compiler()
    setattr_(triton.runtime.driver, "_active", Offline(target))
    setattr_(triton.compiler, "compile", compiler.compile)
    setattr_(torch.cuda, "set_device", lambda device: None)
    return compiler
