"""Every error that octavo raises on purpose.

    OctavoError
    ├── ConfigError          at start: an option, a model folder or a combination that cannot work
    │   └── BadCheckpoint    a model file that is damaged, incomplete or of a refused kind
    ├── RequestError         one request is at fault (HTTP 400); carries the parameter's name
    │   ├── PromptTooLong    the prompt does not fit the context, or never fits the cache
    │   ├── UnfetchedMedia   a URL in the request from which nothing came (HTTP 422)
    │   └── UnknownModel     a model or adapter name that is not served (HTTP 404)
    ├── Overloaded           nothing was done, try again later (HTTP 503); carries `retry_after_s`
    ├── EngineDead           the core ended; every open request ends with this (HTTP 503)
    └── Unsupported          octavo does not do this; says what would work (HTTP 501)

A message says what was given, what is allowed and what to change. ConfigError, RequestError and Unsupported
are also ValueErrors, as users of the field's other engines expect.
"""

from collections.abc import Iterable


class OctavoError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(OctavoError, ValueError):
    """An option, or a combination of options, that cannot work."""


class BadCheckpoint(ConfigError):
    """A model file that is damaged, incomplete or refused."""


class RequestError(OctavoError, ValueError):
    """One request is at fault; no other request is disturbed."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(RequestError):
    """The prompt does not fit the context, or can never fit the cache."""


class UnfetchedMedia(RequestError):
    """A file that the request names could not be fetched."""


class UnknownModel(RequestError):
    """The name of a model or adapter that is not served."""


class Overloaded(OctavoError):
    """Nothing was done; the same request may be sent again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(OctavoError):
    """The engine core ended; the message holds the root cause as far as it is known.

    retry_after_s: when a new core may be there; None: none is coming
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unsupported(OctavoError, ValueError):
    """Something octavo does not do; the message says what would work."""


def wrong(name: str, what: str) -> RequestError:
    """Return the error that says `what` of the field `name` of a request."""
    return RequestError(f"{name} {what}.", name)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean …?" with the known word that is most like this one; "" when none is."""
    from difflib import get_close_matches  # for a message about a mistake only

    found = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" Did you mean {found[0]}?" if found else ""
