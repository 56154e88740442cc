"""Which tests of the suite run: all but the slow ones and most cases of matrices, or with --whole all."""

import os
import zlib
from pathlib import Path


def is_whole(config):
    """Whether slow tests and all cases are asked for: by --whole, or because files or tests are named."""
    return config.getoption("--whole") or not any(Path(name).is_dir() for name in config.args)


def runs_on_gpu(item):
    """Whether a test of kernels takes the GPU that is there: elsewhere Triton's interpreter runs it."""
    return getattr(getattr(item, "module", None), "DEVICE", "cpu") == "cuda"


def asked_for(items, whole):
    """Yield the tests to run.

    What is opt_in waits for its variable of the environment, what is slow for `whole`. Of a matrix the first
    case of each function runs, and of the others one in n (none, without n): by a checksum of its name, so
    that it is the same one every time.
    """
    begun = set()
    for item in items:
        variable, slow, matrix = map(item.get_closest_marker, ("opt_in", "slow", "matrix"))
        if (variable and not os.environ.get(variable.args[0])) or (slow and not whole):
            continue
        function, name = item.nodeid.partition("[")[0], item.nodeid.encode()
        if whole or not matrix or function not in begun or zlib.crc32(name) % (*matrix.args, 1 << 32)[0] == 0:
            begun.add(function)
            yield item
