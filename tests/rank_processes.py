"""Ranks of a test as processes of their own, forked off a server that has imported torch."""

import multiprocessing

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["octavo.runtime.distributed.context", "tests.model_driver"])


def exit_codes(target, arguments, timeout_s=100):
    """Call `target` in a process per tuple of arguments; how each of them ends."""
    ranks = [_CONTEXT.Process(target=target, args=given) for given in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout_s)
    return [rank.exitcode for rank in ranks]
