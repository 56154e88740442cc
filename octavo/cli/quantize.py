"""Round a model's weights to fewer bits and write them to a file that other programs load as well.

MODEL is a folder, a hub name or a GGUF file; OUT a new file (gguf:…) or folder (the others). Weights are
rounded to nearest: GPTQ, AWQ and other calibrated methods stay with their own tools.
"""

import argparse
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.base.registry import load_object
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.frontend.text.gguf_export import vocabulary_metadata

TARGETS = ("gguf:Q8_0", "gguf:Q6_K", "gguf:Q5_K_M", "gguf:Q5_K_S", "gguf:Q4_K_M", "gguf:Q4_K_S", "gguf:Q4_0",
           "gguf:BF16", "gguf:F16", "compressed-tensors:W4A16", "fp8")  # fmt: skip
_GGUF = "octavo.runtime.loader.gguf_export:write_quantized"
_PACKED = "octavo.runtime.loader.packed_export:write_quantized"

EXAMPLES = """\
  octavo quantize org/name model.gguf --to gguf:Q4_K_M
  octavo quantize ./folder ./folder-w4a16 --to compressed-tensors:W4A16
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL", help="A folder, a GGUF file, or a hub name.")
    parser.add_argument("out", metavar="OUT", type=Path, help="What is written; it must not be there yet.")
    parser.add_argument(
        "--to", required=True, choices=TARGETS, metavar="FORMAT", help=f"{', '.join(TARGETS)}."
    )
    parser.add_argument("--revision", default="", help="Branch, tag or commit on the hub.")
    parser.add_argument("--download-dir", default="", help="Where hub downloads are kept.")


def run(args: argparse.Namespace) -> int:
    """Write the file, print how many matrices have each type."""
    if args.out.exists():
        raise ConfigError(f"{args.out} is there already: name another file or folder, or remove it.")
    given = {"model": args.model, "revision": args.revision, "download_dir": args.download_dir}
    config = resolve(EngineArgs.from_options(given | {"device": "cpu"}), needs_device=False)
    kind, _, recipe = args.to.partition(":")
    if kind == "gguf":
        is_folder, path = config.checkpoint.format != "gguf", Path(config.checkpoint.path)
        vocabulary = vocabulary_metadata(path, config.checkpoint.vocab_size) if is_folder else {}
        counts = load_object(_GGUF)(config, args.out, recipe, vocabulary)
    else:
        counts = load_object(_PACKED)(config, args.out, args.to)
    print(f"{args.out}: {', '.join(f'{count} matrices {name}' for name, count in counts.items() if count)}")
    return 0
