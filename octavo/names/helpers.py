"""Small functions that vLLM's programs import from its `utils`."""

import os
import socket
from pathlib import Path
from uuid import uuid4

from octavo.base.hub import locate
from octavo.base.link import Place, Unreachable
from octavo.frontend.text.loader import load_tokenizer
from octavo.frontend.text.tokenizer import Tokenizer

GIB_BYTES = 1 << 30
_ANYWHERE = Place("8.8.8.8", 80, "", 0.0)
"""An address beyond this machine. Nothing is sent there: the system only says which way would lead to it."""


def random_uuid() -> str:
    """A new id of 32 hexadecimal digits."""
    return uuid4().hex


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def get_ip() -> str:
    """This machine's address towards others: VLLM_HOST_IP, else as the routes say, else the loopback's."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    try:
        return _ANYWHERE.own_address()
    except Unreachable:
        return "127.0.0.1"


def get_open_port() -> int:
    """A TCP port that is free now."""
    return get_open_ports_list(1)[0]


def get_open_ports_list(count: int = 5) -> list[int]:
    """Several, none twice."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports: list[int] = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def get_tcp_uri(ip: str, port: int) -> str:
    """tcp://ip:port, an IPv6 address in brackets."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


get_distributed_init_method = get_tcp_uri


def get_tokenizer(tokenizer_name: str, *, revision: str = "", download_dir: str = "") -> Tokenizer:
    """The tokenizer of a folder, GGUF file or hub name. Raises ConfigError."""
    return load_tokenizer(locate(str(tokenizer_name), revision=revision, download_dir=download_dir))


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """The text of a template's file; what is no file is the template itself."""
    if chat_template is None:
        return None
    text = str(chat_template)
    is_path = "{" not in text and "\n" not in text
    return Path(text).read_text(encoding="utf-8") if is_path else text
