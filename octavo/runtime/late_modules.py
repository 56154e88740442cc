"""`import_torch`: torch for an engine; what of it an engine does not use waits.

More than half of `import torch` goes to what serves compilers, exports and training. The code of these
modules waits until one of them is asked for a name, or a module of torch is imported that is not there. Then
all of them run, in the order in which torch wanted them, which their circles need, and before anything else.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from octavo.runtime.preload import make_context

_NAMES = """_higher_order_ops _meta_registrations _tensor_docs compiler distributed._meta_registrations
    distributions export func fx masked nested nn.intrinsic nn.qat nn.quantizable nn.quantized optim profiler
    quantization sparse testing utils.data"""
_LATE = frozenset(["torchgen.model", *(f"torch.{name}" for name in _NAMES.split())])
_FROM_C = "torch.fx.experimental.sym_node"
"""C++ asks for its names holding a lock that modules that run would want."""
_FUNCTIONS = "cond", "vmap", "while_loop"
"""What torch itself takes from these modules, and calls by its own name."""


def import_torch(device: str = "cpu") -> None:
    """Import torch for a device. A script that is to have all of it at once has imported it before."""
    make_context(device)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _FINDER)
        torch = import_module("torch")
        if hasattr(torch._C, "_set_generator_metaclass"):  # from 2.13 on; one of those that wait would do it
            torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)
        vars(torch)["__getattr__"] = partial(_of_torch, torch, torch.__getattr__)
        _FINDER.is_open = False


def _of_torch(torch: ModuleType, other: Callable[[str], Any], name: str) -> Any:
    """Return what is not there: a module that one of those that wait imports, or what torch says."""
    is_module = PathFinder.find_spec(f"torch.{name}", torch.__path__) is not None
    return import_module(f"torch.{name}") if is_module else other(name)


class _LateModule(ModuleType):
    """A module until its first use."""

    def __getattr__(self, name: str) -> Any:
        if _FINDER.is_open and name in _FUNCTIONS:
            return _FINDER.late_function(self, name)
        if name == "__all__" or not name.startswith("__"):  # others are asked of every module
            _FINDER.need(self)
        return ModuleType.__getattribute__(self, name)


class _Given(Loader):
    """Loads a module that has been made."""

    def __init__(self, module: ModuleType, spec: ModuleSpec | None) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder:
    """Finds the modules that wait, and runs them. Of several threads the first to ask does it."""

    def __init__(self) -> None:
        self.is_open = True
        """Torch is being imported, or will be."""
        self._waiting: dict[ModuleType, Any] = {}
        """Their loaders, in the order in which torch wanted them."""
        self._functions: list[tuple[ModuleType, str]] = []
        self._lock, self._is_running = threading.RLock(), False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(("torch.", "torchgen.")) or not (self._waiting or self.is_open):
            return None
        if self.is_open:
            waits = sys.modules.get(name.rpartition(".")[0]) in self._waiting and name != _FROM_C
            is_late = name in _LATE or waits
            spec = PathFinder.find_spec(name, path) if is_late else None
            if spec is not None:
                module = _LateModule(name)
                self._waiting[module], spec.loader = spec.loader, _Given(module, spec)
            return spec
        package = sys.modules.get(name.rpartition(".")[0])
        if not self._is_running or package in self._waiting:
            self.need(package)
        there = sys.modules.get(name)
        if there is None:
            return None
        there.__spec__ = ModuleSpec(name, _Given(there, there.__spec__))  # what ran imported it: not again
        return there.__spec__

    def need(self, module: ModuleType | None = None) -> None:
        """Run all that waits; while that goes on, or torch is imported, just a module that is asked for."""
        with self._lock:
            wanted = list(self._waiting)
            if self.is_open or self._is_running:
                wanted = [waits for waits in wanted if waits is module]
            self._is_running = not self.is_open
            for found in wanted:
                if found in self._waiting:  # else another has asked for it
                    spec: Any = found.__spec__
                    spec.loader = found.__loader__ = self._waiting.pop(found)
                    spec.loader.exec_module(found)
                    found.__class__ = ModuleType
            if not self._waiting:
                for home, name in self._functions:
                    setattr(sys.modules["torch"], name, getattr(home, name))

    def late_function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        """Return what calls a function of a module; torch gets the function itself once it is there."""
        self._functions.append((module, name))

        def call(*args: Any, **keywords: Any) -> Any:
            return getattr(module, name)(*args, **keywords)

        return call


_FINDER = _Finder()
run_late_modules = _FINDER.need
