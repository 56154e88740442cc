"""What `octavo route` needs: the servers behind it, how to choose among them, and its own address."""

from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.config.option import option
from octavo.config.secret import Secret

POLICIES = ("prefix", "least_load", "round_robin", "session")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router."""

    policy: str = option(
        "prefix",
        "Who gets the next request: who has its beginning in the cache and is not busy, who has least to do, "
        "each in turn, or who has the session.",
        choices=POLICIES,
    )
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 = every interface (give a key then).")
    port: int = option(8080, "TCP port; 0 = any free one.")
    insecure: bool = option(False, "Allow a public address without a key.")
    api_key: list[Secret] = option([], "Keys, one of which a request must bear; also OCTAVO_API_KEY.")
    upstream_api_key: str = option("", "Key that the servers want; empty = what the client sent.")
    tokenizer: str = option(
        "",
        "Model whose tokenizer and chat template say which prompts begin with the same tokens: a folder, a "
        "GGUF file or a name; empty = texts are compared.",
    )
    session_header: str = option("x-session-id", "Header that names the session of a request.")
    health_interval: float = option(2.0, "Seconds between looks whether a server is ready.")
    connect_timeout: float = option(5.0, "Seconds in which a server must accept a connection.")
    max_request_bytes: int = option(16 * 1024 * 1024, "Largest body of a request; larger ones get 413.")
    shutdown_timeout: float = option(30.0, "Seconds that open requests get to finish on SIGTERM.")

    def check(self) -> None:
        """Refuse what cannot be. Raises ConfigError."""
        for name in ("health_interval", "connect_timeout", "max_request_bytes"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name} must be above 0, got {value}.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}.")


def check_servers(urls: list[str]) -> list[str]:
    """Return the servers' addresses without a slash at the end. Raises ConfigError."""
    urls = [url.rstrip("/") for url in urls]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"A server must be an address like http://127.0.0.1:8000, got {url!r}.")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"A server is named twice: {', '.join(urls)}.")
    if not urls:
        raise ConfigError(
            "Which servers? Name them: octavo route http://127.0.0.1:8000 http://127.0.0.1:8001"
        )
    return urls
