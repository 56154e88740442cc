"""`octavo serve` as a process of its own over a core with a FakeExecutor: `python -m tests.served_process`.

Arguments: orders for tests.process_fakes as JSON, then the flags. All but the model is as in production, and
it is ready in about a second. `ServeProcess` is the same for tests, with what they ask of a process.
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import httpx
import psutil

from octavo.cli.main import main
from octavo.serving.process import extra_process
from tests.fakes import ByteTokenizer, fake_config
from tests.process_fakes import EXECUTOR

_PATIENCE_S = 60.0


def _config(orders, args):
    config = fake_config(
        max_model_len=args.max_model_len or 4096,
        num_blocks=4096,
        max_num_seqs=args.max_num_seqs or 4,
        max_num_batched_tokens=256,
    )
    names = [field.name for field in dataclasses.fields(config.front)]
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, distributed_executor_backend=EXECUTOR),
        checkpoint=dataclasses.replace(config.checkpoint, config={**config.checkpoint.config, **orders}),
        front=dataclasses.replace(config.front, **{name: getattr(args, name) for name in names}),
    )


class ServeProcess:
    """A running server. Used as a context manager, it is killed in the end, whatever happened."""

    def __init__(self, *flags, orders=None, env=None, program=None, wait=True, **popen):
        self.folder = Path(tempfile.mkdtemp(prefix="octavo-test-"))
        """All that it puts into the file system for temporary things."""
        self.log_file = self.folder.with_suffix(".log")
        self._seen = set()
        self.port = free_port()
        self.url = f"{'https' if '--ssl-certfile' in flags else 'http'}://127.0.0.1:{self.port}"
        program = program or ["-m", "tests.served_process", json.dumps(orders or {})]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, *flags, "--port", str(self.port)],
                **{"stdout": log, "stderr": log, **popen},
                env={**os.environ, "TMPDIR": str(self.folder), **(env or {})},
            )
        if wait:
            try:
                self.wait_for_status(200)
            except BaseException:
                self.__exit__()
                raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.children()
        for process in [*self._seen, self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log_file.unlink()

    @property
    def log(self):
        return self.log_file.read_text()

    def is_alive(self):
        return self.process.poll() is None

    def children(self):
        """Its processes. They are remembered: once it is killed, nobody can tell whose they were."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.is_alive() else []
        self._seen.update(children)
        return children

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=_PATIENCE_S, verify=False, **options)

    def post(self, path, body, **options):
        return httpx.post(self.url + path, json=body, timeout=_PATIENCE_S, verify=False, **options)

    @contextmanager
    def stream(self, num_tokens):
        """The lines of an answer that will have so many events; the first one has come."""
        body = {
            "model": "fake",
            "prompt": "hello",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=_PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines

    def wait_for_status(self, status, path="/health"):
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                if self.get(path).status_code == status:
                    return
            except httpx.TransportError:
                assert self.is_alive(), self.log
            time.sleep(0.02)
        raise AssertionError(f"{path} was never {status}:\n{self.log}")

    def wait_for_log(self, text, times=1):
        deadline = time.monotonic() + _PATIENCE_S
        while self.log.count(text) < times:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def signal(self, number=signal.SIGTERM):
        self.children()
        self.process.send_signal(number)

    def end(self, timeout_s=_PATIENCE_S):
        """Its exit code, after it has ended by itself; nothing of it may be left."""
        self.children()
        code = self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(self._seen, 5)
        assert not alive, f"still there: {alive}"
        left = [path.name for path in self.folder.glob("octavo-*")]
        assert not left, f"left behind: {left}"
        return code


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(first, *rest):
    """The command line, or (what the command line starts) one more front; with a fake model and tokenizer.

    Another order, for this process: `restarts`, to start a core after any number of deaths, at once.
    """
    policy = "octavo.frontend.client.restart.RestartPolicy.delay_s"
    with (
        patch(policy, lambda self: 0.0) if '"restarts"' in first else nullcontext(),
        patch("octavo.serving.process.main_process.resolve", lambda args: _config(json.loads(first), args)),
        patch("octavo.serving.process.supervisor._MODULE", "tests.served_process"),
        patch("octavo.cli.serve.start_ahead", lambda module: None),  # it would import torch
        patch("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer()),
    ):
        return main(["serve", *rest]) if first.startswith("{") else extra_process.main([first, *rest])


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
