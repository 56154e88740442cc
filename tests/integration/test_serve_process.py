"""`octavo serve` as a process: how it starts, how it ends, what it survives. Only the model is a fake."""

import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.process_fakes import wait_until
from tests.served_process import ServeProcess, free_port

SLOW = {"step_s": 0.05}
SECOND_IS_READY = "api1 octavo.serving.process.extra_process: Serving."
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def plain():
    """A server that no test harms."""
    with ServeProcess("--max-num-seqs", "2") as server:
        yield server


@pytest.fixture(scope="module")
def locked():
    with ServeProcess(
        "--api-key", "first-key", "--root-path", "/octavo", env={"VLLM_API_KEY": "second-key"}
    ) as server:
        yield server


def last_events(lines):
    return [line for line in lines if line][-2:]


class TestStart:
    def test_it_says_what_to_try_and_that_is_true(self, plain):
        assert f"octavo serves fake at {plain.url}\n" in plain.log
        assert f"{plain.url}/v1/chat/completions" in plain.log
        assert plain.post("/v1/completions", BODY).json()["usage"]["completion_tokens"] == 4
        assert plain.get("/").headers["content-type"].startswith("text/html")

    @pytest.mark.slow
    def test_before_it_is_ready_it_says_so_and_can_be_ended(self):
        with ServeProcess(orders={"fault": "load:hang"}, wait=False) as server:
            server.wait_for_status(503)
            for path in ("/ready", "/v1/models", "/"):
                answer = server.get(path)
                assert (answer.status_code, "starting" in answer.text) == (503, True)
                assert int(answer.headers["retry-after"]) > 0
            time.sleep(0.5)
            server.signal()
            assert server.end(5) == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("after_s", [0.3, 1.0])
    def test_ended_while_it_starts_it_leaves_nothing(self, after_s, tmp_path):
        path = tmp_path / "s"
        with ServeProcess("--uds", str(path), wait=False) as server:
            time.sleep(after_s)
            server.signal()
            assert server.end(10) in (0, -signal.SIGTERM), server.log
            assert not path.exists()

    def test_a_port_in_use(self, plain):
        begun_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "octavo", "serve", "no-such-model", "--port", str(plain.port)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"Port 127.0.0.1:{plain.port} is in use" in done.stderr
        assert time.monotonic() - begun_s < 5, "nothing was loaded"

    def test_a_damaged_model(self, tmp_path):
        (tmp_path / "config.json").write_text("{broken")
        done = subprocess.run(
            [sys.executable, "-m", "octavo", "serve", str(tmp_path), "--port", str(free_port())],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1].startswith("octavo: error: ")
        assert "config.json" in done.stderr.splitlines()[-1]

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("fault", "code", "says"), [("config", 2, "the option is wrong"), ("raise", 1, "told to fail")]
    )
    def test_a_core_that_cannot_start(self, fault, code, says):
        with ServeProcess(orders={"fault": f"load:{fault}"}, wait=False) as server:
            assert server.end() == code
            assert says in server.log.splitlines()[-1]


class TestEnd:
    def test_idle_it_ends_at_once(self):
        with ServeProcess() as server:
            begun_s = time.monotonic()
            server.signal(signal.SIGINT)
            assert server.end() == 0
            assert time.monotonic() - begun_s < 5

    def test_running_requests_finish_and_new_ones_are_refused(self):
        with ServeProcess(orders=SLOW) as server, server.stream(24) as lines, ThreadPoolExecutor() as pool:
            plain = pool.submit(server.post, "/v1/completions", {**BODY, "max_tokens": 20})
            time.sleep(0.3)
            server.signal(signal.SIGTERM)
            server.wait_for_status(503, "/ready")
            assert server.get("/health").json() == {"status": "draining"}
            begun_s = time.monotonic()
            refused = server.post("/v1/completions", BODY)
            assert time.monotonic() - begun_s < 0.5
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) > 0
            *_, last, done = last_events(lines)
            assert '"finish_reason":"length"' in last
            assert done == "data: [DONE]"
            assert plain.result().json()["choices"][0]["finish_reason"] == "length"
            assert server.end() == 0

    def test_at_the_deadline_the_rest_ends_with_an_error(self):
        with ServeProcess("--shutdown-timeout", "0.5", orders=SLOW) as server, server.stream(2000) as lines:
            server.signal()
            begun_s = time.monotonic()
            assert '"error":' in last_events(lines)[-1]
            assert 0.4 < time.monotonic() - begun_s < 3
            assert server.end() == 0

    def test_a_second_signal_ends_at_once(self):
        with ServeProcess(orders=SLOW) as server, server.stream(2000) as lines:
            server.signal()
            server.wait_for_status(503, "/ready")
            begun_s = time.monotonic()
            server.signal(signal.SIGINT)
            assert '"error":' in last_events(lines)[-1]
            assert server.end() == 0
            assert time.monotonic() - begun_s < 5

    @pytest.mark.slow
    def test_killed_it_takes_its_core_along(self):
        with ServeProcess() as server:
            children = server.children()
            assert children
            server.signal(signal.SIGKILL)
            assert server.end() == -signal.SIGKILL

    def test_without_its_core_it_ends_if_told_so(self):
        with ServeProcess("--on-crash", "exit") as server:
            [core] = server.children()
            core.kill()
            assert server.end(5) == 1
            assert "ended unexpectedly" in server.log.splitlines()[-1]

    def test_an_idle_websocket_does_not_hold_it(self):
        with ServeProcess() as server, connect(f"ws://127.0.0.1:{server.port}/v1/chat/completions"):
            server.signal()
            assert server.end(10) == 0


class TestKeys:
    def test_without_a_key_only_health_and_the_pages_are_open(self, locked):
        for path in ("/health", "/", "/docs"):
            assert locked.get(path).status_code == 200
        for path in (
            "/v1/models",
            "/metrics",
            "/ready",
            "/openapi.json",
            "/server_info",
            "/none",
            "/version",
        ):
            answer = locked.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, 401)

    @pytest.mark.parametrize("key", ["first-key", "second-key"])
    def test_each_key_opens_everything(self, locked, key):
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("/v1/models", "/octavo/v1/models", "/metrics", "/server_info", "/is_paused"):
            assert locked.get(path, headers=headers).status_code == 200
        assert locked.get("/octavo/v1/models").status_code == 401
        assert locked.post("/v1/completions", BODY, headers=headers).status_code == 200

    def test_websockets(self, locked):
        url = f"ws://127.0.0.1:{locked.port}/v1/chat/completions"
        with pytest.raises(InvalidStatus) as refused:
            connect(url)
        assert refused.value.response.status_code == 401
        with connect(url, additional_headers={"Authorization": "Bearer first-key"}):
            pass

    def test_two_keys_never_share_cached_prompts(self, locked):
        prompt = {
            **BODY,
            "prompt": "a long prompt of which the second bearer must not learn that it was here",
        }
        path, hits = "/v1/completions", []
        for key in ("first-key", "second-key", "first-key"):
            headers = {"Authorization": f"Bearer {key}"}
            locked.post(path, prompt, headers=headers)
            lines = locked.get("/metrics", headers=headers).text.splitlines()
            [line] = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total{")]
            hits.append(float(line.split()[-1]))
        assert hits[0] == hits[1] < hits[2]

    def test_keys_are_in_no_log(self, locked):
        assert "first-key" not in locked.log
        assert "second-key" not in locked.log


class TestBounds:
    def test_a_full_queue_is_told_at_once(self):
        with ServeProcess("--max-num-queued-reqs", "0") as server:
            server.post("/v1/completions", BODY)
            begun_s = time.monotonic()
            refused = server.post("/v1/completions", BODY)
            assert time.monotonic() - begun_s < 0.5
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ServiceUnavailableError")
            assert int(refused.headers["retry-after"]) > 0
            assert server.get("/health").status_code == 200

    @pytest.mark.slow
    def test_by_default_the_queue_has_four_places_per_seat(self):
        body = {**BODY, "max_tokens": 20}  # a second each: none ends before all have come
        with ServeProcess("--max-num-seqs", "2", orders=SLOW) as server, ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: server.post("/v1/completions", body).status_code, range(20)))
            assert (answers.count(200), answers.count(503)) == (10, 10)

    def test_limits_hold_on_the_real_loop(self, plain):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        many = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        for data, status in (
            (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
            (head + b"X: " + b"a" * 700_000 + b"\r\n\r\n", b"431"),
            (head + b"Content-Length: 999999999\r\n\r\n" + b"x" * 500_000, b"413"),
            (head + b"Transfer-Encoding: chunked\r\n\r\n" + many * 17, b"413"),
            (head.replace(b"localhost", b"evil.example") + b"Content-Length: 2\r\n\r\n{}", b"403"),
            (head + b"Origin: https://evil.example\r\nContent-Length: 2\r\n\r\n{}", b"403"),
        ):
            with socket.create_connection(("127.0.0.1", plain.port), timeout=30) as client:
                client.sendall(data)
                assert client.recv(1000).split()[1] == status
        assert plain.get("/health").status_code == 200

    def test_paths_and_ids_leave_no_trace_in_metrics(self, plain):
        with httpx.Client(base_url=plain.url) as client:
            lengths = []
            for number in range(50):
                client.request("PUT", f"/path-{number}", headers={"X-Request-Id": f"id-{number}"})
                if number in (0, 49):
                    lengths.append(len(client.get("/metrics").text))
        assert lengths[1] < lengths[0] + 200
        assert "path-" not in plain.get("/metrics").text

    @pytest.mark.slow
    def test_file_descriptors_run_out_and_come_back(self):
        with ServeProcess("--header-timeout", "2") as server:
            num_open = psutil.Process(server.process.pid).num_fds()
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_open + 20, num_open + 20))
            idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
            time.sleep(0.5)
            assert server.is_alive()
            for client in idle[::2]:
                client.close()
            assert server.post("/v1/completions", BODY).status_code == 200
            for client in idle:
                client.close()
            assert "No connection can be accepted" in server.log

    @pytest.mark.matrix
    @pytest.mark.parametrize("output", ["closed", "stuck", "failing"])
    def test_nobody_has_to_read_what_it_prints(self, output):
        pipe = os.pipe()
        if output == "stuck":
            _fill(pipe[1])
        else:
            os.close(pipe[0])
        full = os.open("/dev/full", os.O_WRONLY)
        options = {
            "closed": {"preexec_fn": _close_outputs},
            "stuck": {"stdout": pipe[1], "stderr": pipe[1]},
            "failing": {"stdout": pipe[1], "stderr": full},
        }[output]
        with ServeProcess("--log-stats-interval-s", "0.1", **options) as server:
            for number in range(30):
                assert server.get(f"/none-{number}").status_code == 404
            assert server.post("/v1/completions", BODY).status_code == 200
            server.signal()
            assert server.end(20) == 0
        for fd in (full, pipe[1], *([pipe[0]] if output == "stuck" else [])):
            os.close(fd)


def _fill(pipe):
    """So that whoever writes to it waits."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 65536)
    os.set_blocking(pipe, True)


def _close_outputs():
    os.close(1)
    os.close(2)


class TestOtherDoors:
    def test_a_unix_socket(self, tmp_path):
        path = tmp_path / "s"
        with ServeProcess("--uds", str(path), wait=False) as server:
            server.wait_for_log("octavo serves fake at unix:")
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://any.name", timeout=60) as client:
                assert client.post("/v1/completions", json=BODY).status_code == 200
            server.signal()
            assert server.end() == 0
            assert not path.exists()

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
    def test_tls(self, tmp_path):
        key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
        subprocess.run(
            [
                *(
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                    "-nodes",
                ),
                *("-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", key, "-out", certificate),
            ],
            check=True,
            capture_output=True,
        )
        with ServeProcess("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
            trusting = ssl.create_default_context(cafile=certificate)
            answer = httpx.get(f"{server.url}/v1/models", verify=trusting)
            assert answer.status_code == 200
            with socket.create_connection(("127.0.0.1", server.port)) as silent:  # speaks no TLS
                silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert b"200" not in silent.recv(100)
            assert f"octavo serves fake at https://127.0.0.1:{server.port}" in server.log
            server.signal()
            assert server.end() == 0

    def test_a_certificate_that_is_none(self, tmp_path):
        (tmp_path / "c").write_text("no certificate")
        with ServeProcess("--ssl-certfile", str(tmp_path / "c"), wait=False) as server:
            assert server.end() == 2
            assert "ssl_certfile, ssl_keyfile or ssl_ca_certs cannot be used" in server.log


@pytest.fixture(scope="module")
def pair():
    """Two front processes; the last test ends them."""
    with ServeProcess("--api-server-count", "2", orders=SLOW) as server:
        server.wait_for_log(SECOND_IS_READY)
        yield server


class TestSeveralFronts:
    def test_both_serve_and_count_together(self, pair):
        def count():
            lines = pair.get("/metrics").text.splitlines()
            counts = [line for line in lines if line.startswith("vllm:request_success") and "length" in line]
            return sum(float(line.split()[-1]) for line in counts)

        due = count()
        for least in (12, 100):  # who takes a connection is up to the system
            for _ in range(least):
                assert pair.post("/v1/completions", BODY).status_code == 200
            due += least
            if wait_until(lambda: "api1 octavo.access" in pair.log, 2):
                break
        assert "api1 octavo.access" in pair.log, "the second took some"
        assert wait_until(lambda: count() == due, 20), "each tells the others twice a second"

    @pytest.mark.slow
    def test_one_that_dies_is_replaced(self, pair):
        [front] = [child for child in pair.children() if "tests.served_process" in child.cmdline()]
        front.kill()
        pair.wait_for_log(SECOND_IS_READY, times=2)
        for _ in range(12):
            assert pair.post("/v1/completions", BODY).status_code == 200

    @pytest.mark.slow
    def test_both_drain(self, pair):
        body = {**BODY, "max_tokens": 30}
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(pair.post, "/v1/completions", body) for _ in range(8)]
            time.sleep(0.5)
            pair.signal()
            reasons = [answer.result().json()["choices"][0]["finish_reason"] for answer in answers]
        assert reasons == ["length"] * 8
        assert pair.end() == 0
