"""Bounds what there is to read: lines of a file, of a function, and of the whole package.

Run by `make lint` and by the tests. Blank lines and comments count. Exceptions stand below with a reason.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("octavo", "tools")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BUDGETS = {"Python": 98_000, "C++ and web": 14_000}
"""Lines in octavo/ at most. A feature that does not fit first removes what it makes superfluous."""
LANGUAGES = {
    ".py": "Python",
    **dict.fromkeys((".cpp", ".h", ".js", ".css", ".html", ".svg"), "C++ and web"),
}
LONG_FILES: dict[str, str] = {}
"""Path → why it may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""path:name → why it may be longer."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def totals(root: Path = ROOT) -> dict[str, int]:
    """Lines in octavo/ of each language that has a budget."""
    lines = dict.fromkeys(BUDGETS, 0)
    for path in (root / "octavo").rglob("*"):
        if path.suffix in LANGUAGES:
            lines[LANGUAGES[path.suffix]] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def oversized(root: Path = ROOT) -> Iterator[str]:
    """One line of text per file or function that is too long, and per budget that is exceeded."""
    for language, num_lines in totals(root).items():
        if num_lines > BUDGETS[language]:
            yield f"octavo/: {num_lines} lines of {language}, at most {BUDGETS[language]}"
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            source = path.read_text(encoding="utf-8")
            num_lines = len(source.splitlines())
            if num_lines > MAX_FILE_LINES and name not in LONG_FILES:
                yield f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}"
            yield from _long_functions(name, ast.parse(source))


def _long_functions(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES and f"{name}:{node.name}" not in LONG_FUNCTIONS:
            yield f"{name}:{node.lineno} {node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def main() -> int:
    """Print what is too long, and the number of lines per room."""
    faults = list(oversized())
    for fault in faults:
        print(fault)
    for room in sorted(path for path in (ROOT / "octavo").iterdir() if path.is_dir()):
        lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in room.rglob("*.py"))
        if lines:
            print(f"  {room.name:<12} {lines:6} lines")
    for language, num_lines in totals().items():
        print(f"  {language:<12} {num_lines:6} lines of {BUDGETS[language]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
