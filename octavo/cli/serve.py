"""Serve a model over HTTP, with OpenAI's API and a page to chat on.

Every option of the engine and of the server is a flag and a key of a --config file. Exit status: 0 after it
was asked to end, 2 = an option cannot work (a port in use, for one), 3 = the model cannot be loaded, 1 = the
engine is gone for good.
"""

import argparse
import os
import signal
import sys
from dataclasses import fields
from types import FrameType

from octavo.base import env, log
from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.base.processes import leave, start_ahead
from octavo.base.registry import load_object
from octavo.cli.flags import (
    add_engine_flags,
    add_flags,
    add_foreign_flags,
    engine_options,
    foreign_options,
    options,
)
from octavo.cli.models_file import read_models
from octavo.config.args import EngineArgs
from octavo.config.compat import translate
from octavo.config.foreign import SERVER, SERVER_ALIASES
from octavo.config.resolve_server import resolve_server
from octavo.config.served_models import ServedModels
from octavo.config.server import ServerConfig
from octavo.serving.process.listener import Listener

_CORE = "octavo.engine.process"
_NODE = "octavo.engine.node:run_node"
_SERVE = "octavo.serving.process.main_process:serve"
_BAD_MODEL = 3
_DEFAULTS = {"shutdown_timeout": 30.0}
"""Where a server differs from an engine in a program."""
_KNOWN = {field.name for field in fields(ServerConfig)}

EXAMPLES = """\
  octavo serve
  octavo serve org/name --max-model-len 32k --port 8080
  octavo serve ./model.gguf --host 0.0.0.0 --api-key "$KEY"
  octavo serve --config serve.yaml
  octavo serve --models models.yaml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    add_flags(parser.add_argument_group("server"), ServerConfig)
    add_foreign_flags(parser, {**SERVER, **SERVER_ALIASES})
    parser.add_argument("-q", dest="quantization", default=None, help=argparse.SUPPRESS)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until asked to end. What cannot work is told before anything is loaded."""
    _open_standard_files()
    signal.signal(signal.SIGTERM, _leave)
    what, config = configs(args)
    if config.headless:
        return _run_node(what)
    with Listener.open(config) as listener:
        _start_core(what)
        serve = load_object(_SERVE)  # after the port is known to be free: it takes a second
        try:
            serve(what, config, listener)
        except (BadCheckpoint, Unsupported) as error:
            log.flush()  # else a line of the log may come between this one and its end
            print(f"octavo: error: {error}", file=sys.stderr)
            return _BAD_MODEL
    return leave(0)


def configs(args: argparse.Namespace) -> tuple[EngineArgs | ServedModels, ServerConfig]:
    """What the arguments say about the engine, or about several, and about the server. Raises ConfigError."""
    if args.model_tag:
        args.model = args.model_tag
    config, options = resolve_server(_server_config(args)), _DEFAULTS | engine_options(args)
    if config.models or config.models_dir:
        if "model" in options:
            raise ConfigError(
                f"{options['model']!r} and --models or --models-dir: give one model or several."
            )
        if config.lora_modules or config.lora_folder or config.preload_prefixes:
            text = (
                "lora_modules, lora_folder and preload_prefixes are for servers of one model: leave them out."
            )
            raise ConfigError(text)
        return read_models(config.models, config.models_dir, options, config.models_max), config
    engine = EngineArgs.from_options(options)
    if config.lora_modules and not (engine.enable_lora or engine.enable_prompt_adapter):
        raise ConfigError("lora_modules needs enable_lora: add --enable-lora, or --enable-prompt-adapter.")
    return engine, config


def _start_core(what: EngineArgs | ServedModels) -> None:
    """Start the process of an engine that computes in it: it imports torch while the server is imported."""
    if isinstance(what, ServedModels) or what.distributed_executor_backend not in ("auto", "inproc", "uni"):
        return
    if what.data_parallel_size * what.tensor_parallel_size * what.pipeline_parallel_size == 1:
        start_ahead(_CORE)


def _run_node(what: EngineArgs | ServedModels) -> int:
    if isinstance(what, ServedModels):
        raise ConfigError("headless: a node takes one model: leave out --models and --models-dir.")
    load_object(_NODE)(what.create_engine_config())
    return leave(0)


def _server_config(args: argparse.Namespace) -> ServerConfig:
    given = options(args, ServerConfig) | foreign_options(args, (*SERVER_ALIASES, *SERVER))
    translated = translate(given, _KNOWN, SERVER_ALIASES, SERVER)
    if (keep_alive_s := env.keep_alive_s()) is not None:
        translated.setdefault("keep_alive_timeout", keep_alive_s)
    return ServerConfig(**translated)


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM before the server can handle it: end as it would, leaving nothing behind."""
    raise SystemExit(0)


def _open_standard_files() -> None:
    """Where standard output or error are closed, no socket may get their numbers: much code writes there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
