"""A model over two nodes: the text is one device's, also when a node dies or the cable is cut.

The nodes of the last tests have networks of their own (namespaces), joined by a cable: that takes root.

Runs with --whole alone; tests/unit/engine/test_nodes.py has the parts.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from octavo import SamplingParams
from tests.process_fakes import wait_until
from tests.served_process import free_port

KEY = "a key of more than sixteen characters"
OPTIONS = [
    *("--dtype", "float32", "--skip-tokenizer-init"),
    *("--num-gpu-blocks-override", "400", "--max-model-len", "2048"),
    *("--hf-overrides", '{"max_position_embeddings": 2048}'),
]
SIZES = {"tp": ["-tp", "2"], "pp": ["-pp", "2"]}
LONG = {"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 2048}}
PROMPTS = [[i + 1] * (3 + 7 * i) for i in range(5)]


@contextmanager
def processes():
    """Start programs, which are killed with their children in the end."""
    started = []

    def start(*words, log, name=""):
        prefix = ["ip", "netns", "exec", name] if name else []
        with log.open("ab") as file:
            started.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-m", "octavo", "serve", *map(str, words)],
                    stdout=file,
                    stderr=file,
                    env={**os.environ, "OCTAVO_NODE_KEY": KEY, "TMPDIR": str(log.parent)},
                )
            )
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()


class Server:
    """A server by its socket file, which is seen from all network namespaces."""

    def __init__(self, folder):
        self.path = Path(tempfile.mkdtemp(dir="/tmp")) / "socket"
        self.log = folder / "node0.log"
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.path)), base_url="http://here")

    def is_ready(self):
        try:
            return self.path.exists() and self.client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, prompt=(1, 2, 3), timeout_s=240, **options):
        body = {"prompt": list(prompt), "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        asked = body | {"return_token_ids": True} | options
        return self.client.post("/v1/completions", json=asked, timeout=timeout_s)

    def tokens(self, prompt, **options):
        answer = self.ask(prompt, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]


@pytest.fixture
def expected(tiny_llama, make_llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, temperature=0)
    outputs = make_llm(tiny_llama, **LONG).generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def two_nodes(model, folder, sizes, host, names=("", ""), silence_s=20):
    """Node 0 serves, node 1 is headless."""
    server = Server(folder)
    where = ["--master-addr", host, "--master-port", free_port(), "--node-timeout", silence_s]
    shared = [model, *OPTIONS, *SIZES[sizes], "--nnodes", 2, *where]
    with processes() as start:

        def join():
            return start(*shared, "-r", 1, "--headless", log=folder / "node1.log", name=names[1])

        node0 = start(*shared, "--uds", server.path, log=server.log, name=names[0])
        node1 = join()
        try:
            assert wait_until(server.is_ready, 90), server.log.read_text()
            yield server, node0, node1, join
        finally:
            server.client.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["tp", "pp"])
def test_two_nodes_equal_one_and_a_killed_node_is_replaced(tiny_llama, tmp_path, expected, sizes):
    with two_nodes(tiny_llama, tmp_path, sizes, "127.0.0.2") as (server, node0, node1, join):
        assert [server.tokens(prompt) for prompt in PROMPTS] == expected
        ranks = psutil.Process(node1.pid).children(recursive=True)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(server.ask(max_tokens=1500)))
        asking.start()
        time.sleep(0.5)
        node1.kill()
        node1.wait()
        assert psutil.wait_procs(ranks, 2)[1] == [], "no orphan"
        second = join()
        asking.join(240)
        assert answers[0].status_code == 200, "open requests go on in the next engine"
        assert len(answers[0].json()["choices"][0]["token_ids"]) == 1500
        assert [server.tokens(prompt) for prompt in PROMPTS] == expected
        assert "Node 1" in server.log.read_text() and "is lost" in server.log.read_text()
        node0.send_signal(signal.SIGTERM)
        assert (node0.wait(15), second.wait(15)) == (0, 0)
    assert list(tmp_path.glob("octavo-*")) == []


@pytest.fixture
def cable():
    """Two network namespaces and what joins them; skipped where that is not allowed."""
    names = [f"octavo{os.getpid()}{end}" for end in "ab"]
    lines = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add end0 netns {names[0]} type veth peer name end1 netns {names[1]}",
        *(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev end{i}" for i, name in enumerate(names)),
        *(f"ip -n {name} link set {link} up" for i, name in enumerate(names) for link in ("lo", f"end{i}")),
    ]
    try:
        for line in lines:
            try:
                subprocess.run(line.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"There are no network namespaces here: {error}")
        yield names
    finally:
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def cut(names):
    """The cable is out."""
    subprocess.run(["ip", "-n", names[1], "link", "set", "end1", "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "-n", names[1], "link", "set", "end1", "up"], check=True)


@pytest.mark.slow
def test_a_cut_cable(tiny_llama, tmp_path, expected, cable):
    """A short break passes: the request goes on. A long one ends the engine; the nodes meet again."""
    with two_nodes(tiny_llama, tmp_path, "tp", "10.77.0.1", cable, silence_s=5) as (server, node0, node1, _):
        answers = []

        def ask(count):
            answers.append(server.ask(PROMPTS[2], max_tokens=count))

        asking = threading.Thread(target=ask, args=(1500,))
        asking.start()
        time.sleep(0.3)
        with cut(cable):
            time.sleep(3)
            assert answers == [], "it was cut while the request ran"
        asking.join(240)
        tokens = answers[0].json()["choices"][0]["token_ids"]
        assert tokens[:12] == expected[2]
        assert len(tokens) == 1500
        assert "is lost" not in server.log.read_text()

        asking = threading.Thread(target=ask, args=(600,))
        asking.start()
        time.sleep(0.3)
        with cut(cable):
            assert wait_until(lambda: "Node 1" in (text := server.log.read_text()) and "is lost" in text, 15)
            assert wait_until(lambda: "Node 0 is lost" in (tmp_path / "node1.log").read_text(), 15)
            assert psutil.Process(node1.pid).children() == []
        asking.join(240)
        assert answers[1].json()["choices"][0]["token_ids"] == tokens[:600], (
            "and goes on when the nodes have met"
        )
        assert (node0.poll(), node1.poll()) == (None, None)
