"""`install`: parts of torch that an engine does not use are executed when somebody asks them for something.

`import torch` takes most of a start, and half of that goes to what serves compilers, exports and training. In
octavo's own processes these modules are found, but their code waits for the first use of a name of theirs.
Programs that import octavo get torch as it is. Kernels for the meta device are among it: who uses that calls
`load_all`.
"""

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAMES = "_meta_registrations distributions export masked optim profiler testing utils.data"
_LATE = frozenset(f"torch.{name}" for name in _NAMES.split())
_lock = threading.RLock()
_waiting: "list[_LateModule]" = []
"""In the order in which torch asked for them."""


def install() -> None:
    """Have these modules wait, if torch has not been imported."""
    if "torch" not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def load_all() -> None:
    """Execute what still waits, as `import torch` would have."""
    for module in _waiting:
        _LateModule.execute(module)  # one that has been used is no _LateModule any more
    _waiting.clear()


class _LateModule(ModuleType):
    """A module until its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what importlib and others ask of every module
            raise AttributeError(name)
        self.execute()
        return getattr(self, name)

    def execute(self) -> None:
        """Run its code, once."""
        with _lock:
            if type(self) is not _LateModule:
                return
            self.__class__ = ModuleType  # type: ignore[assignment]
            spec: Any = self.__spec__
            spec.loader.own.exec_module(self)


class _Loader:
    """Makes the module and leaves the rest to its own loader."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _waiting.append(_LateModule(spec.name))
        return _waiting[-1]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""


class _Finder:
    """Finds the modules that wait."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LATE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader)
            spec.loader = loader
        return spec
