"""A server that a benchmark has started ends with it, also where that is ended by a signal."""

import signal
import subprocess
import sys

import psutil
import pytest

SERVER = """
import os, sys, time
print(os.getpid(), flush=True)
if sys.argv[-1] == "loads":
    time.sleep(60)
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
BENCHMARK = """
import signal, socket, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run where it is ignored
from octavo.bench.server_process import ServerProcess
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
with ServerProcess([sys.executable, "-c", sys.argv[1], "--port", port, sys.argv[2]], None):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("state", ["loads", "ready"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_it(number, state):
    command = [sys.executable, "-c", BENCHMARK, SERVER, state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as benchmark:
        server = psutil.Process(int(benchmark.stdout.readline()))
        if state == "ready":
            assert benchmark.stdout.readline() == "ready\n"
        benchmark.send_signal(number)
        assert benchmark.wait(30) == 128 + number
    assert not server.is_running()
