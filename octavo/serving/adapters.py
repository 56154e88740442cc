"""`ServedAdapters`: the adapters that requests may name, by their names. A part of `Engines`.

Those of --lora-modules, those loaded over HTTP, and those found in --lora-folder when they are first asked
for. Several API processes share what they know by a file; without one it is kept here.
"""

import asyncio
import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from octavo.base.errors import ConfigError, OctavoError, RequestError, UnknownModel, wrong
from octavo.base.log import get_logger
from octavo.config.gguf_adapter import SUFFIX, is_gguf, open_adapter
from octavo.config.lora import CONFIG, read_module, read_peft
from octavo.config.prompt_tuning import is_learned_prompt
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
from octavo.serving.errors import HTTPError

logger = get_logger(__name__)
_FILE = "adapters"
_MOST_NAMES = 100_000
_LOOK_S = 0.05


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter by its name."""

    name: str
    path: str
    id: int
    parent: str = ""
    """The base model's name, where another than the first was given."""
    is_prompt: bool = False
    """It is a learned prompt."""
    task_id: int = 0

    @property
    def request(self) -> LoRARequest | PromptAdapterRequest:
        """As engines take it."""
        if self.is_prompt:
            return PromptAdapterRequest(self.name, self.id, self.path, task_id=self.task_id)
        return LoRARequest(self.name, self.id, self.path, load_inplace=True)


class LoRAScale(msgspec.Struct, forbid_unknown_fields=True):
    """One adapter of a sum: by its name, or by its place in /v1/models (from 0, as llama.cpp counts)."""

    name: str | None = None
    id: int | None = None
    scale: float = 1.0


Scales = Iterable[LoRAScale] | None
"""The adapters that a request adds up, if it asks for any."""


class ServedAdapters:
    """Used on the event loop of one API process."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, base_names: Sequence[str]) -> None:
        self._engine, self._config, self._base_names = engine, config, base_names
        self._known: dict[str, ServedAdapter] = {}
        self._file: Path | None = None
        self._state: tuple[int, int] | None = None
        self._finding: dict[str, asyncio.Lock] = {}
        self._last_id = 0

    def share(self, folder: Path) -> None:
        """Have the API processes of one server know the same. folder: theirs alone, as long as they live"""
        self._file = folder / _FILE

    async def load_modules(self) -> None:
        """Load those of --lora-modules. Raises ConfigError."""
        for text in self._config.lora_modules:
            module = read_module(text)
            try:
                await self.load(
                    module.name, module.path, parent=module.base_model_name, task_id=module.task_id
                )
            except OctavoError as error:
                raise ConfigError(f"lora_modules, {module.name!r}: {error}") from error

    def listed(self) -> list[ServedAdapter]:
        """Return all that have a name by now, in the order of their loading."""
        self._refresh()
        return list(self._known.values())

    async def look_for(self, name: str) -> None:
        """Load the adapter of an unknown name if it is in --lora-folder. Raises RequestError."""
        if self.known(name) is not None or (path := self._path_of(name)) is None:
            return
        try:
            async with self._finding.setdefault(name, asyncio.Lock()):  # once, however many ask
                if self.known(name) is None:
                    await self.load(name, path, in_place=True)
        except RequestError as error:
            text = f"LoRA adapter '{name}' was found but could not be loaded. {error}"
            raise RequestError(text, "model") from error

    def _path_of(self, name: str) -> str | None:
        """Return where in --lora-folder the adapter of this name is."""
        is_plain = "\0" not in name and ".." not in Path(name).parts and str(Path(name)) == name
        if not self._config.lora_folder or not is_plain:
            return None
        folder = Path(self._config.lora_folder, name)
        for path, file in (folder, folder / CONFIG), (folder.with_name(f"{folder.name}{SUFFIX}"),) * 2:
            if file.is_file() and self._is_inside(path):
                return str(path)
        return None

    def sum_of(self, scales: Iterable[LoRAScale]) -> LoRASum | None:
        """Return what a request's list asks for; None: the base. Raises RequestError, UnknownModel."""
        found: list[Any] = [(self._scaled(entry).request, entry.scale) for entry in scales]
        return LoRASum(tuple(found)) if found else None

    async def load(
        self, name: str, path: str, *, in_place: bool = False, parent: str = "", task_id: int = 0
    ) -> None:
        """Load an adapter and give it its name; in_place: in the place of another. Raises RequestError."""
        self._refresh()
        if name in self._base_names:
            text = f"The lora adapter name '{name}' conflicts with a served base model."
            raise invalid_input(text, "lora_name")
        if name in self._known and not in_place:
            raise invalid_input(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                "lora_name",
            )
        entry = self._entry(name, path, parent, task_id)
        if isinstance(request := entry.request, LoRARequest):
            await self._engine.add_lora(request)
        else:
            await self._engine.add_prompt_adapter(request)
        self._enter(entry)

    async def unload(self, name: str, wait_s: float | None = None) -> None:
        """Take the name away at once, and the memory when no request needs it any more.

        wait_s: 0 = refuse what is in use; None = wait for those requests however long. Raises UnknownModel,
        HTTPError (409).
        """
        if (known := self.known(name)) is None:
            raise UnknownModel(f"The lora adapter '{name}' cannot be found.", "lora_name")
        if wait_s == 0 and (count := await self._engine.num_lora_users(known.path)):
            text = f"The lora adapter '{name}' is in use by {count} requests: leave wait_s out to wait."
            raise HTTPError(409, text, "wait_s")
        with self._changing() as names:
            names.pop(name, None)
        waited_s = 0.0
        while await self._engine.num_lora_users(known.path):
            if wait_s is not None and waited_s >= wait_s:
                text = f"The lora adapter '{name}' has lost its name, but after {wait_s:g} s requests use it."
                raise HTTPError(409, text, "wait_s")
            await asyncio.sleep(_LOOK_S)
            waited_s += _LOOK_S
        await self._engine.remove_lora(known.id)

    def known(self, name: str) -> ServedAdapter | None:
        """Return the adapter that has this name by now."""
        self._refresh()
        return self._known.get(name)

    def confined(self, path: str) -> str:
        """Return a path in --lora-folder, relative to it or absolute, as it is. Raises RequestError."""
        if not self._config.lora_folder:
            raise RequestError(
                "Adapters are loaded at run time from one folder: start the server with --lora-folder.",
                "lora_path",
            )
        folder = Path(self._config.lora_folder, path)
        if "\0" in path or not self._is_inside(folder):
            raise wrong("lora_path", "must lie in the server's --lora-folder")
        return str(folder.resolve())

    def _is_inside(self, folder: Path) -> bool:
        """Return True if it lies in the folder of adapters, wherever its links lead."""
        found, root = folder.resolve(), Path(self._config.lora_folder).resolve()
        return found != root and found.is_relative_to(root)

    def _scaled(self, entry: LoRAScale) -> ServedAdapter:
        if (entry.name is None) == (entry.id is None):
            raise RequestError("An entry of lora has a name, or an id.", "lora")
        if entry.id is not None:
            listed = self.listed()
            found = listed[entry.id] if 0 <= entry.id < len(listed) else None
        else:
            found = self.known(entry.name or "")
        if found is None:
            given = entry.id if entry.name is None else entry.name[:200]
            raise UnknownModel(f"The lora adapter {given!r} does not exist.", "lora")
        return found

    def _entry(self, name: str, path: str, parent: str = "", task_id: int = 0) -> ServedAdapter:
        """Return what a folder is to be called; nobody knows it yet. Raises RequestError."""
        folder, is_prompt = Path(path).expanduser(), False
        if is_gguf(folder):
            open_adapter(folder)
        elif not (is_prompt := is_learned_prompt(folder)):
            read_peft(folder)
        known = self._known.get(name)
        self._last_id = 1 + max([self._last_id, *(entry.id for entry in self._known.values())])
        return ServedAdapter(name, path, known.id if known else self._last_id, parent, is_prompt, task_id)

    def _enter(self, entry: ServedAdapter) -> None:
        with self._changing() as names:
            if entry.name not in names and len(names) >= _MOST_NAMES:
                raise RequestError(f"{_MOST_NAMES} adapters have names: unload some.", "lora_name")
            names[entry.name] = entry

    @contextmanager
    def _changing(self) -> Iterator[dict[str, ServedAdapter]]:
        """Change the names, after what other processes did and before what they will do."""
        if self._file is None:
            yield self._known
            return
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._refresh()
            yield self._known
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.msgpack.encode(list(self._known.values())))
            new.replace(self._file)
            self._refresh()

    def _refresh(self) -> None:
        if self._file is None or not self._file.exists():
            return
        stat = self._file.stat()
        if (state := (stat.st_mtime_ns, stat.st_ino)) != self._state:
            entries = msgspec.msgpack.decode(self._file.read_bytes(), type=list[ServedAdapter])
            self._known, self._state = {entry.name: entry for entry in entries}, state


def invalid_input(text: str, parameter: str | None = None) -> HTTPError:
    """Return an error under vLLM's name."""
    return HTTPError(400, text, parameter, kind="InvalidUserInput")
