"""`read_models`: the file of `octavo serve --models`, and the folder of `--models-dir`.

Everything is checked before a port is opened; a fault is a ConfigError with file and line. The options of a
model have the names of flags, and their spelling: `max_model_len: 8k`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.base.duration import seconds_of
from octavo.base.errors import ConfigError, did_you_mean
from octavo.cli.argv import flags_for
from octavo.cli.flags import add_engine_flags, engine_options
from octavo.cli.parser import Parser
from octavo.cli.units import whole_number
from octavo.config.args import EngineArgs
from octavo.config.served_models import ModelEntry, ServedModels

Options = dict[str, Any]
_TOP = ("models", "groups", "defaults", "max_loaded", "memory", "load_timeout", "max_waiting")
_OWN = ("aliases", "preload", "sleep_after", "ttl")
"""Keys of a model that are no options of its engine."""
_NOT_OURS = ("served_model_name", "config")
_WEIGHTS = ("*.safetensors", "*.gguf")


def read_models(file: str, folder: str, options: Options, max_loaded: int = 0) -> ServedModels:
    """The models of a file, of a folder, or of both. Raises ConfigError.

    options: of the command line; they hold for every model that does not say otherwise
    max_loaded: of the command line; it wins
    """
    served = _File(file, options).read() if file else ServedModels(entries=())
    if folder:
        served = replace(served, entries=(*served.entries, *_of_folder(folder, options)))
    names = [name for entry in served.entries for name in (entry.name, *entry.aliases)]
    if doubles := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"The model {doubles[0]!r} is in --models and in --models-dir: name one anew.")
    if not names:
        raise ConfigError(f"{folder or file} holds no model: neither GGUF files nor folders with weights.")
    return replace(served, max_loaded=max_loaded) if max_loaded else served


def _of_folder(folder: str, options: Options) -> Iterator[ModelEntry]:
    """An entry per model folder and GGUF file, by their names."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"--models-dir: there is no folder {folder!r}.")
    for path in sorted(root.iterdir()):
        is_model = path.suffix == ".gguf" if path.is_file() else any(map(any, map(path.glob, _WEIGHTS)))
        if not is_model:
            continue
        files = list(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
        name = path.stem if path.is_file() else path.name
        yield _entry(name, options | {"model": str(files[0] if files else path)})


def _entry(name: str, options: Options, aliases: tuple[str, ...] = (), **own: Any) -> ModelEntry:
    names = {"served_model_name": [name, *aliases]}
    return ModelEntry(name=name, args=EngineArgs.from_options(options | names), aliases=aliases, **own)


class _File:
    """A file being read; knows the line of every key."""

    def __init__(self, path: str, options: Options) -> None:
        import yaml  # with --models only

        self._path = Path(path).expanduser()
        self._options = options
        try:
            text = self._path.read_text(encoding="utf-8")
            self._content, self._root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{path}, line {line}: {error.problem}.") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--models {path} cannot be read: {error}") from error
        self._lines: dict[tuple[str, ...], int] = {}
        self._note_lines(self._root, ())
        self._parser = Parser("octavo serve", "")
        add_engine_flags(self._parser)

    def read(self) -> ServedModels:
        top = self._mapping(self._content, ())
        self._check_keys(top, _TOP, ())
        models = self._mapping(top.get("models"), ("models",))
        defaults = self._options | self._engine_options(
            self._mapping(top.get("defaults") or {}, ("defaults",)), ("defaults",)
        )
        entries = tuple(self._model(str(name), value, defaults) for name, value in models.items())
        self._check_names(entries)
        numbers = {
            field: self._number(top[key], read, key)
            for key, (field, read) in _NUMBERS.items()
            if top.get(key) is not None
        }
        return ServedModels(entries=entries, groups=self._groups(top.get("groups") or {}, models), **numbers)

    def _model(self, name: str, value: Any, defaults: Options) -> ModelEntry:
        where = ("models", name)
        keys = self._mapping({"model": value} if isinstance(value, str) else value, where)
        own = {key: keys[key] for key in _OWN if keys.get(key) is not None}
        aliases = own.pop("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise self._error((*where, "aliases"), f"aliases must be a list of names, got {aliases!r}")
        preload = own.pop("preload", False)
        if not isinstance(preload, bool):
            raise self._error((*where, "preload"), f"preload must be true or false, got {preload!r}")
        times = {f"{key}_s": self._number(given, seconds_of, *where, key) for key, given in own.items()}
        options = self._engine_options({key: keys[key] for key in keys if key not in _OWN}, where)
        if not options.get("model"):
            raise self._error(where, "model is missing: a folder, a GGUF file or a hub name")
        try:
            return _entry(name, defaults | options, tuple(aliases), preload=preload, **times)
        except ConfigError as error:
            raise self._error(where, str(error)) from None

    def _engine_options(self, given: Options, where: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in given.items():
            if (field := str(name).replace("-", "_")) in _NOT_OURS:
                raise self._error((*where, str(name)), f"{name} is not for a model of several: use aliases")
            try:
                found |= engine_options(self._parser.parse_args(flags_for(str(name), value)))
            except ConfigError as error:
                raise self._error((*where, str(name)), f"{name}: {error}") from None
            if field in ("model", "tokenizer", "chat_template") and field in found:
                found[field] = self._beside(found[field])
        return found

    def _beside(self, name: str) -> str:
        """A path is relative to the file."""
        path = self._path.parent / Path(name).expanduser()
        return str(path) if path.exists() and not Path(name).exists() else name

    def _check_names(self, entries: tuple[ModelEntry, ...]) -> None:
        owners: dict[str, str] = {}
        for entry in entries:
            for name in (entry.name, *entry.aliases):
                if name in owners:
                    place = ("models", entry.name, *(["aliases"] if name in entry.aliases else []))
                    raise self._error(place, f"the name {name!r} belongs to {owners[name]!r} already")
                owners[name] = entry.name

    def _groups(self, groups: Any, models: Options) -> tuple[frozenset[str], ...]:
        """The models of each group; a group may name others."""
        groups = self._mapping(groups, ("groups",))

        def members(name: str, path: tuple[str, ...]) -> frozenset[str]:
            where = ("groups", name)
            if name in path:
                raise self._error(where, f"groups contain each other: {' -> '.join((*path, name))}")
            listed = groups[name]
            if not isinstance(listed, list) or not listed:
                raise self._error(where, f"{name} must be a list of models, got {listed!r}")
            found: frozenset[str] = frozenset()
            for item in map(str, listed):
                if item in models:
                    found |= {item}
                elif item in groups:
                    found |= members(item, (*path, name))
                else:
                    known = [*models, *groups]
                    text = f"{item!r} is neither a model nor a group.{did_you_mean(item, known)}"
                    raise self._error(where, text)
            return found

        if clash := groups.keys() & models.keys():
            name = min(clash)
            raise self._error(("groups", name), f"{name!r} is the name of a model")
        return tuple(members(name, ()) for name in groups)

    def _number(self, value: Any, read: Any, *where: str) -> Any:
        try:
            number = read(value)
            if number < 0:
                raise ValueError("it must be 0 or more")
        except Exception as error:
            raise self._error(where, f"{where[-1]}: {value!r} cannot be used: {error}") from None
        return number

    def _mapping(self, value: Any, where: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            name = " of ".join(reversed(where)) or "the file"
            raise self._error(where, f"{name} must hold `name: value` lines, found a {type(value).__name__}")
        return value

    def _check_keys(self, given: Options, known: tuple[str, ...], where: tuple[str, ...]) -> None:
        for name in given:
            if name not in known:
                text = f"unknown key {name!r}; known: {', '.join(known)}.{did_you_mean(str(name), known)}"
                raise self._error((*where, str(name)), text)

    def _note_lines(self, node: Any, where: tuple[str, ...]) -> None:
        """The line of each key; one that stands twice is an error, which YAML would pass over."""
        if getattr(node, "id", "") != "mapping":
            return
        for key, value in node.value:
            place = (*where, str(key.value))
            line = key.start_mark.line + 1
            if place in self._lines:
                raise ConfigError(
                    f"{self._path}, line {line}: {key.value!r} stands in line {self._lines[place]} already."
                )
            self._lines[place] = line
            self._note_lines(value, place)

    def _error(self, where: tuple[str, ...], text: str) -> ConfigError:
        """A fault at a key, or at the nearest one around it."""
        while where and where not in self._lines:
            where = where[:-1]
        return ConfigError(f"{self._path}, line {self._lines.get(where, 1)}: {text.rstrip('.')}.")


def _count(value: Any) -> int:
    return whole_number(str(value))


_NUMBERS = {
    "max_loaded": ("max_loaded", _count),
    "memory": ("memory_bytes", _count),
    "load_timeout": ("load_timeout_s", seconds_of),
    "max_waiting": ("max_waiting", _count),
}
"""Keys of the file → fields of ServedModels, and how they are read."""
