"""deploy/nginx and deploy/caddy: the real proxies read the files, and send each token on as it is made."""

import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from socket import create_connection

import httpx
import pytest
from websockets.sync.client import connect

from tests.served_process import ServeProcess, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
STEP_S = 0.05
NUM_TOKENS = 12
HOST = "llm.example.com"
BODY = {"prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
NGINX = "pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {temp} {servers} }}"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@pytest.fixture(scope="module")
def server():
    flags = ("--allowed-hosts", HOST, "--max-request-bytes", str(16 * 2**20))
    with ServeProcess(*flags, orders={"step_s": STEP_S}) as server:
        yield server


def nginx(folder, port, backend, **changes):
    text = (DEPLOY / "nginx/octavo.conf").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{backend}").replace("listen [::]:80;", "")
    text = text.replace("listen 80;", f"listen 127.0.0.1:{port};")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    temp = " ".join(f"{name}_temp_path {folder}/{name};" for name in TEMPORARY)
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, servers=text, temp=temp), encoding="utf-8")
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
    subprocess.run([program, "-t", "-q", "-c", file], check=True)
    return [program, "-g", "daemon off;", "-c", file]


def caddy(folder, port, backend):
    text = (DEPLOY / "caddy/Caddyfile").read_text(encoding="utf-8")
    formatted = subprocess.check_output(["caddy", "fmt", DEPLOY / "caddy/Caddyfile"], text=True)
    assert formatted == text
    text = text.replace(HOST, f"http://{HOST}:{port}").replace("127.0.0.1:8000", f"127.0.0.1:{backend}")
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n}}\n{text}", encoding="utf-8")
    subprocess.run(["caddy", "validate", "--config", file, "--adapter", "caddyfile"], check=True)
    return ["caddy", "run", "--config", file, "--adapter", "caddyfile"]


@contextmanager
def proxy(kind, server, folder, **changes):
    if not shutil.which(kind.__name__, path="/usr/sbin:/usr/bin:/usr/local/bin"):
        pytest.skip(f"{kind.__name__} is not installed")
    port = free_port()
    command = kind(folder, port, server.port, **changes)
    process = subprocess.Popen(command, env={**os.environ, "HOME": str(folder)})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Host": HOST}, timeout=30) as client:
            wait_for(client)
            yield client
    finally:
        process.terminate()
        process.wait()


def wait_for(client):
    for _ in range(200):
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("the proxy never answered")


def gaps(client):
    """Seconds between the chunks of a stream, and its text."""
    times, lines = [], []
    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                times.append(time.monotonic())
                lines.append(line)
    assert lines[-1] == "data: [DONE]" and len(lines) > NUM_TOKENS / 2
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("kind", [nginx, caddy])
def test_streams_come_as_they_are_made(kind, server, tmp_path):
    with proxy(kind, server, tmp_path) as client:
        assert sum(gap > STEP_S / 2 for gap in gaps(client)) > NUM_TOKENS / 3
        address = f"ws://{HOST}:{client.base_url.port}/v1/chat/completions"
        with connect(address, sock=create_connection(("127.0.0.1", client.base_url.port))) as socket:
            socket.send('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}')
            assert "chat.completion" in socket.recv(timeout=20)
        large = {"purpose": (None, "batch"), "file": ("f", b"{}\n" * 8_000_000)}
        assert client.post("/v1/files", files=large).status_code == 400  # read whole: it has too many lines


def test_the_bounds_of_both_are_those_of_the_server():
    text = (DEPLOY / "nginx/octavo.conf").read_text(encoding="utf-8")
    assert re.findall(r"client_max_body_size (\w+);", text) == ["16m", "201m"]
    assert "max_size 201MB" in (DEPLOY / "caddy/Caddyfile").read_text(encoding="utf-8")
