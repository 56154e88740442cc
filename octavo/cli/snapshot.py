"""Keep a model as an engine has it in memory, with its kernels and tokenizer, for fast starts.

FOLDER is then a model's name for every command: octavo serve FOLDER. It is for this version of octavo, this
kind of machine, and the options given here. On a CPU its weights are mapped, and shared by all engines.
"""

import argparse
import shutil
import sys
from pathlib import Path

import octavo
from octavo.base import env
from octavo.base.errors import ConfigError
from octavo.cli.flags import add_engine_flags, engine_options
from octavo.config import snapshot
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import GPU_KERNELS
from octavo.frontend.text.loader import keep_tokenizer
from octavo.messages.sampling import SamplingParams

EXAMPLES = """\
  octavo snapshot smollm2 ./smollm2.snapshot
  octavo serve ./smollm2.snapshot --served-model-name smollm2
  octavo snapshot org/name ./name.snapshot --quantization fp8 -tp 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", metavar="MODEL", help="The same as --model.")
    parser.add_argument("folder", metavar="FOLDER", help="Where to; it must not be there yet.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model, write the folder; what makes it a snapshot is written last."""
    args.model, folder = args.model_tag, Path(args.folder)
    if folder.exists():
        raise ConfigError(f"{folder} is there already: remove it, or name another folder.")
    folder.mkdir(mode=0o700, parents=True)
    try:
        size = _write(EngineArgs.from_options(engine_options(args)), folder.absolute())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"{folder}: {size / (1 << 30):.2f} GiB. Try: octavo serve {folder}", file=sys.stderr)
    return 0


def _write(args: EngineArgs, folder: Path) -> int:
    (folder / GPU_KERNELS).mkdir()
    env.keep_gpu_kernels(folder / GPU_KERNELS)
    with octavo.LLM.from_engine_args(args) as llm:
        config = llm.llm_engine.config
        if config.checkpoint.is_snapshot:
            raise ConfigError(f"{config.checkpoint.path} is a snapshot itself: name the model.")
        if config.pooling is None:  # so all kernels that a request needs are there
            params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
            llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        machines = llm.collective_rpc("save_snapshot", kwargs={"folder": str(folder)})
        tokenizer = llm.get_tokenizer()
        special = {} if tokenizer is None else keep_tokenizer(tokenizer, folder)
        snapshot.write(config, folder, special, machines[0])
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
