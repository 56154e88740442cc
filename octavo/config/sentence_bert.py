"""Reads what a Sentence-BERT folder says beside the model: chain of modules, prompts, longest text.

The two spellings of each file are those of sentence-transformers before and from 5.7. A module or a value
that octavo does not know stops the start, with the file's name: another pooling would give other vectors.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.checkpoint import read_json

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU", "SiLU", "Sigmoid")
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The modes in the early spelling, in the order in which their vectors are joined."""
_FIRST = ("Transformer", "MLMTransformer")
_MODULES = (*_FIRST, "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
_ENDS = ("SpladePooling", "MultiVectorMask", "LogitScore")
"""Modules of sparse, of multi-vector and of cross encoders."""
_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A module behind pooling. inputs, outputs, bias, activation: of a Dense, in its folder `path`"""

    kind: Literal["dense", "layer_norm", "normalize"]
    path: str = ""
    inputs: int = 0
    outputs: int = 0
    bias: bool = False
    activation: str = "Identity"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What is said; nothing, for other folders."""

    is_pooling: bool = False
    model_path: str = ""
    """Folder of the transformer, if it is not the checkpoint's."""
    modes: tuple[str, ...] = ()
    include_prompt: bool = True
    stages: tuple[Stage, ...] = ()
    max_seq_length: int = 0
    sparse: Literal["", "max", "sum"] = ""
    sparse_logs: int = 1
    is_multi_vector: bool = False
    skipped_words: tuple[str, ...] = ()
    label_tokens: tuple[int, ...] = ()
    activation: str = ""
    """Of a cross-encoder's scores."""
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    @property
    def normalizes(self) -> bool:
        """Return True if vectors leave with length 1."""
        return bool(self.stages) and self.stages[-1].kind == "normalize"

    @property
    def output_size(self) -> int:
        """Return the size of vectors behind the last Dense; 0 if there is none."""
        return next((stage.outputs for stage in reversed(self.stages) if stage.kind == "dense"), 0)


def read_folder(root: Path) -> Folder:
    """Return what the folder of a model says. Raises BadCheckpoint, Unsupported."""
    if not (root / "modules.json").is_file():
        return Folder()
    given: dict[str, Any] = {}
    stages: list[Stage] = []
    modules = _modules(root)
    is_multi_vector = any(kind == "MultiVectorMask" for kind, _ in modules)
    for kind, path in modules:
        match kind:
            case "Pooling":
                given["modes"], given["include_prompt"] = _pooling(path / "config.json")
            case "Dense":
                stages.append(_dense(path, "token_embeddings" if is_multi_vector else "sentence_embedding"))
            case "LayerNorm":
                size = _size(path / "config.json", "dimension")
                stages.append(Stage(kind="layer_norm", path=str(path), inputs=size, outputs=size))
            case "Normalize":
                stages.append(Stage(kind="normalize"))
            case "SpladePooling":
                given |= _splade(path / "config.json")
            case "MultiVectorMask":
                given |= _mask(path / "config.json")
            case "LogitScore":
                given["label_tokens"] = _label_tokens(path / "config.json")
    transformer = modules[0][1]
    text = _first(transformer, _FILES)
    if text.get("query_expansion"):
        raise Unsupported(f"{transformer}: query_expansion of sentence_bert_config.json is not supported.")
    said = _first(root, ("config_sentence_transformers.json",))
    return Folder(
        is_pooling=len(modules) > 1,
        model_path="" if transformer == root else str(transformer),
        stages=tuple(stages),
        max_seq_length=int(text.get("max_seq_length") or 0),
        lower_case=bool(text.get("do_lower_case")),
        prompts={str(name): str(value) for name, value in (said.get("prompts") or {}).items()},
        default_prompt=str(said.get("default_prompt_name") or ""),
        activation=str(said.get("activation_fn") or ""),
        **given,
    )


def _modules(root: Path) -> list[tuple[str, Path]]:
    file = root / "modules.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        rows = [(str(entry["type"]), str(entry["path"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadCheckpoint(f"{file} is no list of modules: {error!r}") from error
    found = []
    for dotted, path in rows:
        kind = dotted.rpartition(".")[2]
        known = (*_MODULES, *_ENDS)
        if not dotted.startswith("sentence_transformers.") or kind not in known:
            raise Unsupported(f"{file}: module type {dotted!r} is not supported: {', '.join(known)} are.")
        if not (root / path).resolve().is_relative_to(root.resolve()):
            raise BadCheckpoint(f"{file}: path {path!r} leads out of the folder")
        found.append((kind, root / path if path else root))
    kinds = [kind for kind, _ in found]
    rest = kinds[1:]
    is_chain = rest[:1] == ["Pooling"] and not {*_FIRST, *_ENDS, "Pooling"} & set(rest[1:])
    is_late = rest.count("MultiVectorMask") == 1 and set(rest) <= {"Dense", "Normalize", "MultiVectorMask"}
    if kinds[:1] not in ([name] for name in _FIRST) or not (
        is_chain or is_late or rest in ([], ["SpladePooling"], ["LogitScore"])
    ):
        raise Unsupported(
            f"{file}: modules must be Transformer, Pooling and what follows, or one of {', '.join(_ENDS)}; "
            f"found {kinds}."
        )
    return found


def _splade(file: Path) -> dict[str, Any]:
    config = read_json(file)
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise Unsupported(f"{file}: {strategy!r:.50} of {activation!r:.50} is not supported.")
    return {"sparse": strategy, "sparse_logs": 2 if activation == "log1p_relu" else 1}


def _mask(file: Path) -> dict[str, Any]:
    config = read_json(file)
    tasks = config.get("skiplist_tasks") or ["document"]
    if config.get("keep_only_token_ids") or tasks != ["document"]:
        raise Unsupported(f"{file}: keep_only_token_ids, and skiplist_tasks but document, are not supported.")
    words = tuple(str(word) for word in config.get("skiplist_words") or [])
    return {"is_multi_vector": True, "skipped_words": words}


def _label_tokens(file: Path) -> tuple[int, ...]:
    """Return the ids for no, if there is one, and yes."""
    config = read_json(file)
    ids = [config[key] for key in ("false_token_id", "true_token_id") if config.get(key) is not None]
    if config.get("true_token_id") is None or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise BadCheckpoint(
            f"{file}: true_token_id and false_token_id must be ids of tokens, found {ids!r:.99}"
        )
    return tuple(ids)


def _pooling(file: Path) -> tuple[tuple[str, ...], bool]:
    """Return the modes, in order, and whether a prompt's tokens count."""
    config = read_json(file)
    given = config.get("pooling_mode")
    if given is None:
        unknown = [
            k for k, on in config.items() if k.startswith("pooling_mode_") and k not in _SWITCHES and on
        ]
        modes = [mode for key, mode in _SWITCHES.items() if config.get(key)] or ["mean"]
    else:
        modes = [given] if isinstance(given, str) else list(given)
        unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise Unsupported(f"{file}: pooling {unknown} is not supported: {', '.join(MODES)} are.")
    return tuple(modes), config.get("include_prompt") is not False


def _dense(path: Path, place: str) -> Stage:
    file = path / "config.json"
    config = read_json(file)
    dotted = str(config.get("activation_function") or "torch.nn.modules.linear.Identity")
    name = dotted.rpartition(".")[2]
    if not dotted.startswith("torch.nn.modules.") or name not in ACTIVATIONS:
        raise Unsupported(
            f"{file}: activation_function {dotted!r} is not supported: {', '.join(ACTIVATIONS)} are."
        )
    others = {"use_residual": False, "module_input_name": place, "module_output_name": place}
    for key, usual in others.items():
        if config.get(key) not in (None, usual):
            raise Unsupported(f"{file}: {key}={config[key]!r} is not supported, only {usual!r} is.")
    inputs, outputs = _size(file, "in_features"), _size(file, "out_features")
    bias = config.get("bias") is not False
    return Stage(kind="dense", path=str(path), inputs=inputs, outputs=outputs, bias=bias, activation=name)


def _size(file: Path, key: str) -> int:
    value = read_json(file).get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
        raise BadCheckpoint(f"{file}: {key} must be a positive integer, found {value!r}")
    return value


def _first(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the first of these files that is there; nothing if there is none."""
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    return read_json(file) if file else {}
