"""Decides what ServerConfig left open and refuses what cannot work, before a socket is opened."""

import dataclasses
from pathlib import Path

from octavo.base import env
from octavo.base.errors import ConfigError
from octavo.config.lora import read_module
from octavo.config.secret import Secret
from octavo.config.server import ServerConfig

_ABOVE_ZERO = (
    "max_request_bytes",
    "max_pending_body_bytes",
    "max_header_bytes",
    "max_connections",
    "keep_alive_timeout",
    "header_timeout",
    "body_timeout",
    "write_timeout",
    "store_max_bytes",
    "store_max_age",
)


def resolve_server(config: ServerConfig) -> ServerConfig:
    """With all keys in `api_key`, also those of the file, the environment and admins. Raises ConfigError."""
    _check(config)
    for text in config.lora_modules:
        read_module(text)
    admins = [*config.admin_api_key, *map(Secret.of, env.admin_api_keys())]
    keys = [*config.api_key, *_keys_of_file(config.api_key_file), *map(Secret.of, env.api_keys()), *admins]
    return dataclasses.replace(
        config,
        api_key=list(dict.fromkeys(keys)),
        admin_api_key=list(dict.fromkeys(admins)),
        dev_mode=config.dev_mode or env.dev_mode(),
        root_path=config.root_path.rstrip("/"),
        lora_folder=_lora_folder(config.lora_folder or env.lora_folder()),
        allow_runtime_lora_updating=config.allow_runtime_lora_updating or env.may_update_loras(),
    )


def _lora_folder(path: str) -> str:
    if path and not Path(path).expanduser().is_dir():
        raise ConfigError(f"lora_folder: there is no folder {path!r}.")
    return str(Path(path).expanduser().resolve()) if path else ""


def _check(config: ServerConfig) -> None:
    for name in _ABOVE_ZERO:
        if (value := getattr(config, name)) <= 0:
            raise ConfigError(f"{name} must be above 0, got {value}.")
    _check_models(config)
    _check_bodies(config.max_request_bytes, config.max_pending_body_bytes)
    if config.api_server_count < 0:
        raise ConfigError(f"api_server_count must be 0 or more, got {config.api_server_count}.")
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, got {config.port}.")
    if config.root_path and not config.root_path.startswith("/"):
        raise ConfigError(f"root_path must begin with /, got {config.root_path!r}.")
    if config.store and not Path(config.store).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"store: there is no folder for the file {config.store!r}.")
    if config.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {config.ssl_cert_reqs}.")
    if config.ssl_keyfile and not config.ssl_certfile:
        raise ConfigError("ssl_keyfile needs ssl_certfile beside it.")
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise ConfigError(
            "ssl_cert_reqs needs ssl_ca_certs: the authorities whose certificates are accepted."
        )
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(config, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"{name}: there is no file {path!r}.")


def _check_models(config: ServerConfig) -> None:
    if config.models_max < 0:
        raise ConfigError(f"models_max must be 1 or more, or 0 for the default, got {config.models_max}.")
    if (config.models or config.models_dir) and config.api_server_count > 1:
        raise ConfigError(
            f"api_server_count={config.api_server_count}: several models have one API process. Leave it out."
        )


def _check_bodies(largest: int, together: int) -> None:
    if together < largest:
        raise ConfigError(
            f"max_pending_body_bytes={together} must be at least max_request_bytes={largest}: else a body of "
            "that size is never read."
        )


def _keys_of_file(path: str) -> list[Secret]:
    """One key per line; empty lines and lines that begin with # do not count."""
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {path!r} cannot be read ({type(error).__name__}).") from error
    keys = [Secret.of(word) for line in lines if (word := line.strip()) and not word.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file: {path!r} holds no key.")
    return keys
