"""Where the server listens, who may reach it, and what is refused before anything is loaded."""

import dataclasses
import os
import re
import socket
import stat

import msgspec
import pytest

from octavo.base.errors import ConfigError
from octavo.config.parallel import ParallelConfig
from octavo.config.resolve_server import resolve_server
from octavo.config.secret import Secret
from octavo.config.server import ServerConfig
from octavo.serving.process.listener import Listener
from octavo.serving.process.main_process import num_api_processes

KEYS = [Secret.of("a-key")]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "OCTAVO_SERVER_DEV_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_a_free_port_is_found_and_told():
    with Listener.open(ServerConfig(port=0)) as listener:
        host, port = listener.socket.getsockname()
        assert (host, listener.url, listener.is_loopback) == ("127.0.0.1", f"http://127.0.0.1:{port}", True)
        assert not listener.socket.getblocking()
        with socket.create_connection((host, port)):
            pass


def test_a_port_in_use():
    with Listener.open(ServerConfig(port=0)) as first:
        port = first.socket.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port 127.0.0.1:{port} is in use: .*--port"):
            Listener.open(ServerConfig(port=port))
    with Listener.open(ServerConfig(port=port)):
        pass


def test_addresses_that_cannot_be():
    with pytest.raises(ConfigError, match=r"--host 'no.such.name.invalid' is no address"):
        Listener.open(ServerConfig(host="no.such.name.invalid", port=0))
    with pytest.raises(ConfigError, match="does not belong to this machine"):
        Listener.open(ServerConfig(host="192.0.2.1", port=0, api_key=KEYS))


def test_a_public_address_needs_a_key_or_the_word(caplog):
    with pytest.raises(ConfigError, match=r"there is no key. Give one with --api-key, .* or say --insecure"):
        Listener.open(ServerConfig(host="0.0.0.0", port=0))
    for options in ({"api_key": KEYS}, {"insecure": True}, {"ssl_cert_reqs": 2}):
        with Listener.open(ServerConfig(host="0.0.0.0", port=0, **options)) as listener:
            assert not listener.is_loopback
            assert listener.url.startswith("http://127.0.0.1:"), "what works on this machine"
    for host in ("127.0.0.1", "localhost", "127.1.2.3"):
        Listener.open(ServerConfig(host=host, port=0)).socket.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6():
    try:
        listener = Listener.open(ServerConfig(host="::1", port=0))
    except ConfigError:
        pytest.skip("no IPv6 here")
    with listener:
        assert re.fullmatch(r"http://\[::1\]:\d+", listener.url)
        assert listener.is_loopback


def test_a_unix_socket_is_its_owners_and_goes_with_him(tmp_path):
    path = tmp_path / "s"
    config = ServerConfig(uds=str(path), host="0.0.0.0")
    with Listener.open(config) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (listener.url, listener.is_loopback) == (f"unix:{path}", False)
        with pytest.raises(ConfigError, match="is in use"):
            Listener.open(config)
        inherited = Listener.inherited(os.dup(listener.socket.fileno()), config)
        inherited.__exit__()
        assert path.exists(), "the file is not the child's to remove"
    assert not path.exists()


def test_what_a_dead_server_left_is_replaced_and_files_are_not(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with Listener.open(ServerConfig(uds=str(path))):
        pass
    path.write_text("mine")
    with pytest.raises(ConfigError, match="a file of that name exists"):
        Listener.open(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be used"):
        Listener.open(ServerConfig(uds=str(tmp_path / "none" / "s")))
    with pytest.raises(ConfigError, match="cannot be used"):
        Listener.open(ServerConfig(uds=str(tmp_path / ("x" * 200))))


def test_keys_come_from_three_places(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfrom-file\n\n  another  \nfrom-flag\n")
    monkeypatch.setenv("OCTAVO_API_KEY", "from-octavo")
    monkeypatch.setenv("VLLM_API_KEY", "from-vllm")
    config = resolve_server(ServerConfig(api_key=[Secret.of("from-flag")], api_key_file=str(file)))
    named = ("from-flag", "from-file", "another", "from-octavo", "from-vllm")
    assert config.api_key == [Secret.of(key) for key in named]


def test_keys_cannot_be_seen():
    config = ServerConfig(api_key=[Secret.of("hidden-key")])
    assert "api_key=[***]" in repr(config)
    assert f"{config.api_key[0]} {config.api_key[0]!r}" == "*** ***"
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ServerConfig)
    assert again == config
    assert b"hidden" not in msgspec.msgpack.encode(config)
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        Secret.of("hidden key")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "# nothing\n", None])
def test_a_file_without_keys_is_a_mistake(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        resolve_server(ServerConfig(api_key_file=str(file)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": -1}, "port must be between 0 and 65535, got -1"),
        ({"api_server_count": -1}, "api_server_count must be 0 or more, got -1"),
        ({"write_timeout": -1.0}, "write_timeout must be above 0"),
        ({"max_pending_body_bytes": 1000}, "max_pending_body_bytes=1000 must be at least max_request_bytes"),
        ({"root_path": "api"}, "root_path must begin with /"),
        ({"ssl_keyfile": "k"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_certfile": "/no/such/file"}, "ssl_certfile: there is no file '/no/such/file'"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs must be 0, 1 or 2"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs needs ssl_ca_certs"),
    ],
)
def test_options_that_cannot_work(options, says):
    with pytest.raises(ConfigError, match=says):
        resolve_server(ServerConfig(**options))


def test_the_rest_is_left_as_it_is(monkeypatch):
    config = ServerConfig(root_path="/api/", dev_mode=False)
    assert resolve_server(config) == dataclasses.replace(config, root_path="/api")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert resolve_server(config).dev_mode


@pytest.mark.parametrize(
    ("device", "cpu_threads", "expected"),
    [("cpu", 64, 1), ("cuda", 2, 1), ("cuda", 8, 2), ("cuda:1", 16, 4), ("cuda", 96, 4)],
)
def test_fronts_where_nobody_says_how_many(device, cpu_threads, expected):
    assert num_api_processes(ParallelConfig(device=device, cpu_threads=cpu_threads)) == expected
