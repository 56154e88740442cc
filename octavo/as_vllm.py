"""Run programs written for vLLM, without a changed word: `import vllm` finds octavo.

    python -m octavo.as_vllm script.py --its --arguments
    python -m octavo.as_vllm -m vllm.entrypoints.openai.api_server --model smollm2

Or `import octavo.as_vllm` before the first `import vllm`. In Python processes that a script starts `vllm` is
octavo, too; in those of a program that imports this, it is not.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_THEIRS, _OURS = "vllm", "octavo"


class _Finder:
    """Every import path of vLLM's is octavo's module of the same path; stands before all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        own = find_spec(_own(fullname)) if fullname.partition(".")[0] == _THEIRS else None
        if own is None:
            return None
        is_package = own.submodule_search_locations is not None
        loader: Any = self
        return ModuleSpec(fullname, loader, origin=own.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual; it is replaced at once."""

    def exec_module(self, module: ModuleType) -> None:
        """Put octavo's module in its place."""
        sys.modules[module.__name__] = import_module(_own(module.__name__))

    def get_code(self, fullname: str) -> object:
        """For `python -m`."""
        spec = find_spec(_own(fullname))
        loader: Any = spec.loader if spec else None
        return loader.get_code(_own(fullname))


def _own(fullname: str) -> str:
    return _OURS + fullname.removeprefix(_THEIRS)


def install() -> None:
    """Let `vllm` mean octavo from now on. Raises ImportError when vLLM itself has been imported."""
    if sys.modules.get(_THEIRS, sys.modules[_OURS]) is not sys.modules[_OURS]:
        raise ImportError("vllm is imported already: import octavo.as_vllm comes first.")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _tell_children() -> None:
    """Put a module `vllm` on the path of processes to come, spawned or started."""
    folder = str(Path(__file__).with_name("names") / "children")
    sys.path.append(folder)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else folder


def _run(arguments: list[str]) -> None:
    """A script, or with -m a module, as Python itself would."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.exit(f"usage: {__doc__}")


if __name__ == "__main__":
    from octavo.as_vllm import install as install_once  # of the module that programs import, too

    install_once()
    _tell_children()
    _run(sys.argv[1:])
else:
    install()
