"""`octavo scale` asks a server, and says what it answered."""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octavo.base.errors import OctavoError
from octavo.cli import scale


@pytest.fixture
def server():
    """A server that keeps what it was asked, and refuses 9 replicas."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            is_refused = body["new_data_parallel_size"] == 9
            self.send_response(400 if is_refused else 200)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "too many"}}' if is_refused else b"{}")

        def log_message(self, *_):
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def run(*words):
    parser = argparse.ArgumentParser()
    scale.configure(parser)
    return scale.run(parser.parse_args(words))


def test_it_asks_and_says(server, capsys):
    url, asked = server
    assert run("3", "--url", url, "--api-key", "k", "--drain-timeout", "5") == 0
    assert asked == [("/scale_elastic_ep", "Bearer k", {"new_data_parallel_size": 3, "drain_timeout": 5})]
    assert capsys.readouterr().out == f"{url} has 3 replicas.\n"


def test_refusals_are_told(server):
    url, _ = server
    with pytest.raises(OctavoError, match="too many"):
        run("9", "--url", url)
    with pytest.raises(OctavoError, match="does not answer"):
        run("2", "--url", "http://127.0.0.1:1")
