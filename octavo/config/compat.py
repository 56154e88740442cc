"""Options of other engines in octavo's terms, by `config.foreign`; for EngineArgs and `octavo serve`."""

from collections.abc import Container, Mapping
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.foreign import Foreign
from octavo.base.log import get_logger
from octavo.config.foreign import ALIASES, ENGINE, Alias

logger = get_logger(__name__)


def translate(
    options: Mapping[str, Any],
    known: Container[str],
    aliases: Mapping[str, Alias] = ALIASES,
    foreign: Mapping[str, Foreign] = ENGINE,
) -> dict[str, Any]:
    """The options in octavo's terms. `known` names win. Raises ConfigError for what is refused."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            translated[name] = value
        elif name in aliases:
            translated.setdefault(aliases[name].own, _converted(name, value, aliases[name]))
        elif name not in foreign:
            translated[name] = value
        elif foreign[name].asks(value):
            _take(name, value, foreign[name])
    return translated


def _converted(name: str, value: Any, alias: Alias) -> Any:
    try:
        return alias.convert(value)
    except (TypeError, ValueError, LookupError):
        raise ConfigError(f"{name}={value!r} cannot be read as {alias.own}.") from None


def _take(name: str, value: Any, foreign: Foreign) -> None:
    if foreign.is_refused:
        raise ConfigError(f"{name}={value!r}: {foreign.text}")
    logger.warning("%s has no effect. %s", name, foreign.text)
