"""`octavo run-batch` over a core with a FakeExecutor: `python -m tests.batch_process ORDERS ARGUMENTS`."""

import json
import sys
from unittest.mock import patch

from octavo.cli.main import main
from tests.fakes import ByteTokenizer
from tests.process_fakes import process_config


def run(orders, *arguments):
    """The command line, whose engine takes these orders; its exit status."""
    with (
        patch("octavo.cli.run_batch.resolve", lambda args: process_config(**orders)),
        patch("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer()),
    ):
        return main(["run-batch", *arguments])


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), *sys.argv[2:]))
