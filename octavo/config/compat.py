"""Options of other engines in octavo's terms; called by EngineArgs and by `octavo serve`.

An option that octavo has not is judged by its row in `base.foreign`. A few are other spellings of options
that octavo has.
"""

from collections.abc import Callable, Container, Mapping
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.foreign import ENGINE, Foreign
from octavo.base.log import get_logger

logger = get_logger(__name__)

ALIASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "async_scheduling": ("steps_in_flight", lambda wanted: 2 if wanted else 1),
    "kv_offloading_size": ("swap_space", float),
    "profiler_config": ("profiler_dir", lambda config: str(config["torch_profiler_dir"]) if config else ""),
}
"""vLLM's name → octavo's, and the value in octavo's terms."""


def translate(
    options: Mapping[str, Any],
    known: Container[str],
    aliases: Mapping[str, tuple[str, Callable[[Any], Any]]] = ALIASES,
    foreign: Mapping[str, Foreign] = ENGINE,
) -> dict[str, Any]:
    """The options in octavo's terms. `known` names win. Raises ConfigError for what is refused."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            translated[name] = value
        elif name in aliases:
            own, convert = aliases[name]
            translated.setdefault(own, _converted(name, value, own, convert))
        elif name not in foreign:
            translated[name] = value
        elif foreign[name].asks(value):
            _take(name, value, foreign[name])
    return translated


def _converted(name: str, value: Any, own: str, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError, LookupError):
        raise ConfigError(f"{name}={value!r} cannot be read as {own}.") from None


def _take(name: str, value: Any, foreign: Foreign) -> None:
    if foreign.is_refused:
        raise ConfigError(f"{name}={value!r}: {foreign.text}")
    logger.warning("%s has no effect. %s", name, foreign.text)
