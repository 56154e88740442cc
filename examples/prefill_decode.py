"""One server computes prompts, another generates; a proxy tells it where to fetch keys and values."""

import json
import os
import subprocess
import sys
import time

import httpx

PORTS = {"kv_producer": 8351, "kv_consumer": 8352}


def serve(role: str, port: int) -> subprocess.Popen[bytes]:
    transfer = json.dumps({"kv_connector": "TCPConnector", "kv_role": role, "kv_port": port + 10})
    options = f"serve smollm2 --enable-prompt-tokens-details --port {port} --kv-transfer-config".split()
    command = [sys.executable, "-m", "octavo", *options, transfer]
    return subprocess.Popen(command, env=os.environ | {"OCTAVO_NODE_KEY": "a secret that both know"})


def proxy(client: httpx.Client, body: dict) -> dict:
    first, second = (f"http://127.0.0.1:{port}/v1/completions" for port in PORTS.values())
    asked = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = client.post(first, json=asked).json()["kv_transfer_params"]
    return client.post(second, json=body | {"kv_transfer_params": params}).json()


def main() -> None:
    servers = [serve(role, port) for role, port in PORTS.items()]
    with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=300) as client:
        while not all(client.get(f"http://127.0.0.1:{n}/ready").is_success for n in PORTS.values()):
            time.sleep(0.2)
        answer = proxy(client, {"prompt": "Once upon a time, in a land far away, " * 8, "max_tokens": 8})
    print(repr(answer["choices"][0]["text"]), answer["usage"]["prompt_tokens_details"])
    for server in servers:
        with server:
            server.terminate()


main()
