"""Import paths without files: modules made of the table when somebody imports them.

`octavo` installs the finder behind all others, so that files win. Packages that are there and have more names
than their files (`octavo.engine`, `octavo.config`) take theirs by `names_of`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, NoReturn

from octavo.base.bytecode import kept_bytecode
from octavo.base.errors import Unsupported
from octavo.base.registry import load_object
from octavo.names.table import HOMES, LATER, MODULES, PATHS, PROGRAMS

_ROOT = "octavo"


@cache
def entries(path: str) -> dict[str, str]:
    """The names of an import path below octavo, with their entries."""
    pairs = (word.partition("=") for word in PATHS.get(path, "").split())
    return {name: entry or name for name, _, entry in pairs}


def load(path: str, name: str) -> Any:
    """What the import path has by this name. Raises AttributeError."""
    entry = entries(path).get(name)
    if entry is None:
        raise AttributeError(f"module '{_ROOT}{'.' * bool(path)}{path}' has no attribute {name!r}")
    return load_object(HOMES[entry]) if entry in HOMES else _missing(entry, LATER[entry])


def names_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` (PEP 562) of the module `octavo.….`: loads a name of the table, once."""
    path = module.removeprefix(_ROOT).removeprefix(".")

    def get(name: str) -> Any:
        with kept_bytecode():
            value = load(path, name)
        setattr(sys.modules[module], name, value)
        return value

    return get


class Finder:
    """Finds and makes the modules of the table that have no file: a finder and a loader of importlib's.

    Derived from neither: importlib.abc takes longer to import than all of octavo that `import octavo` loads.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's, if the table has it, or has paths below it."""
        root, _, below = fullname.partition(".")
        if root != _ROOT or not _is_known(below):
            return None
        loader: Any = self
        return ModuleSpec(fullname, loader, origin=fullname, is_package=below not in PROGRAMS)

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names; or put the module that it is in its place."""
        path = module.__name__.removeprefix(f"{_ROOT}.")
        if path in MODULES:
            sys.modules[module.__name__] = import_module(MODULES[path])
            return
        names = sorted(entries(path))
        module.__doc__ = f"Names of octavo's under the import path {path!r}."
        vars(module).update(__getattr__=names_of(module.__name__), __dir__=lambda: names, __all__=names)

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`: octavo's command of the same use."""
        path = fullname.removeprefix(f"{_ROOT}.")
        if path not in PROGRAMS:
            return None
        command = f"sys.exit(main([{PROGRAMS[path]!r}, *sys.argv[1:]]))"
        source = f"import sys; from octavo.cli.main import main; {command}"
        return compile(source, f"<{fullname}>", "exec")


def _is_known(path: str) -> bool:
    return path in PATHS or path in MODULES or any(known.startswith(f"{path}.") for known in PATHS)


class _Missing(type):
    """A name whose feature octavo has not: it can be imported and annotate, and says so when used.

    Refused is what one does with a class or function: calls, attributes, derived classes.
    """

    reason: str

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> "_Missing":
        for base in bases:
            if isinstance(base, _Missing):
                base()
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *args: object, **options: object) -> NoReturn:
        raise Unsupported(f"{cls.__name__}: {cls.reason}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


def _missing(name: str, reason: str) -> type:
    """A stand-in that raises Unsupported with the reason."""
    return _Missing(name, (), {"reason": reason, "__module__": "octavo", "__doc__": reason})
