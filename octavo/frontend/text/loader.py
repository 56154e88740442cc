"""Finds the tokenizer that belongs to a model.

Called where an engine is started (`octavo.llm`, `frontend/async_engine`). Importing this module costs the
tokenizers library and Jinja, not transformers.
"""

from pathlib import Path

from octavo.base.errors import BadCheckpoint
from octavo.base.gguf import open_gguf
from octavo.base.hub import locate
from octavo.config.engine import EngineConfig
from octavo.frontend.text.folder_vocab import tokenizer_from_folder
from octavo.frontend.text.gguf_vocab import tokenizer_from_metadata
from octavo.frontend.text.tokenizer import Tokenizer


def tokenizer_for(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer of an engine: the model's own or the one named; None with skip_tokenizer_init.

    Raises ConfigError when it cannot be found, BadCheckpoint when it cannot be read.
    """
    model = config.model
    if model.skip_tokenizer_init:
        return None
    path = Path(config.checkpoint.path)
    if model.tokenizer:
        path = locate(model.tokenizer, download_dir=model.download_dir)
    return load_tokenizer(path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder (tokenizer files, else one GGUF). Raises BadCheckpoint."""
    if path.is_file():
        return tokenizer_from_metadata(open_gguf(path).metadata)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not (path / "tokenizer.json").is_file():
        return tokenizer_from_metadata(open_gguf(ggufs[0]).metadata)
    if not path.is_dir():
        raise BadCheckpoint(f"{path} is neither a GGUF file nor a folder")
    return tokenizer_from_folder(path)
