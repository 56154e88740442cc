"""A node of its own around FakeWorkers: `python -m tests.node_process JSON`; the keys are ParallelConfig's.

Exit code 0: its engine has ended in good order; 2: it was refused, and says why.
"""

import dataclasses
import json
import sys

from octavo.base import log
from octavo.base.errors import ConfigError
from octavo.engine.node import run_node
from tests.process_fakes import WORKER, process_config


def node_config(*, tp=2, nnodes=2, orders=None, checkpoint="fake", **parallel):
    """The config of a node, or of node 0."""
    config = process_config("mp", tp=tp, **(orders or {}))
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, nnodes=nnodes, **parallel),
        checkpoint=dataclasses.replace(config.checkpoint, path=checkpoint),
    )


def main(options):
    log.setup("node")
    try:
        run_node(node_config(**json.loads(options)), WORKER)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
