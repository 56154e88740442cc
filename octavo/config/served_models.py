"""What `octavo serve` needs to know of several models: what --models and --models-dir say.

Made by `cli.models_file`, used by the server's pool of models.
"""

from dataclasses import dataclass

from octavo.config.args import EngineArgs


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model, which is loaded when it is first asked."""

    name: str
    args: EngineArgs
    aliases: tuple[str, ...] = ()
    preload: bool = False
    """Load it before the server takes requests."""
    sleep_after_s: float = 0.0
    """Seconds without a request after which it sleeps; 0 = never."""
    ttl_s: float = 0.0
    """Seconds without a request after which it is unloaded; 0 = never."""


@dataclass(frozen=True, kw_only=True)
class ServedModels:
    """All models of one server; requests that name none get the first."""

    entries: tuple[ModelEntry, ...]
    groups: tuple[frozenset[str], ...] = ()
    """Names of models that may be awake together; a model in none is awake alone. Empty: any may."""
    max_loaded: int = 4
    """Engine processes at most, sleeping ones included."""
    memory_bytes: int = 0
    """Of host memory for all models; 0 = what is free when the server starts."""
    load_timeout_s: float = 600.0
    """Seconds that a request waits for its model."""
    max_waiting: int = 256
    """Requests that wait for one model at most."""

    def may_share(self, a: str, b: str) -> bool:
        """Whether these two may be awake together."""
        return not self.groups or any(a in group and b in group for group in self.groups)
