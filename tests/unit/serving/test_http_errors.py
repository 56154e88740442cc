"""Errors as clients see them: status, form, and nothing of the inside."""

import json

import pytest
from starlette.exceptions import HTTPException

from octavo.base.errors import (
    ConfigError,
    EngineDead,
    Overloaded,
    PromptTooLong,
    RequestError,
    UnknownModel,
    Unsupported,
)
from octavo.serving.errors import HTTPError, error_body, error_response


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x", "n"), 400, "BadRequestError"),
        (PromptTooLong("x", "prompt"), 400, "BadRequestError"),
        (UnknownModel("x", "model"), 404, "NotFoundError"),
        (Unsupported("x"), 501, "NotImplementedError"),
        (ConfigError("x"), 501, "NotImplementedError"),
        (Overloaded("x"), 503, "ServiceUnavailableError"),
        (EngineDead("x"), 503, "engine_dead"),
        (HTTPError(429, "x"), 429, "RateLimitError"),
        (HTTPError(504, "x"), 504, "TimeoutError"),
        (HTTPException(405), 405, "MethodNotAllowedError"),
        (ValueError("x"), 500, "InternalServerError"),
        (ZeroDivisionError(), 500, "InternalServerError"),
    ],
)
def test_status_and_form(error, status, kind):
    answer = error_response(error)
    body = json.loads(answer.body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert body["error"] == {
        "message": body["error"]["message"],
        "type": kind,
        "param": getattr(error, "parameter", None),
        "code": status,
    }


def test_when_to_try_again():
    assert error_response(Overloaded("x", retry_after_s=7.4)).headers["retry-after"] == "7"
    assert error_response(Overloaded("x", retry_after_s=0.1)).headers["retry-after"] == "1"
    assert error_response(EngineDead("x", retry_after_s=2.0)).headers["retry-after"] == "2"
    assert "retry-after" not in error_response(EngineDead("x")).headers
    assert "retry-after" not in error_response(RequestError("x")).headers


@pytest.mark.parametrize("error", [KeyError("/home/me/secret"), EngineDead("Traceback: /usr/lib/x.py")])
def test_the_inside_stays_inside(error):
    text = error_body(error).decode()
    assert "secret" not in text and "Traceback" not in text and "/usr" not in text


def test_addresses_and_paths_are_taken_out():
    text = error_body(RequestError("<Thing at 0x7f12ab34cd> in /home/me/model.py of /v1/chat")).decode()
    assert "0x7f" not in text and "/home" not in text
    assert "/v1/chat" in text


@pytest.mark.parametrize("character", ["x", "\N{GRINNING FACE}", '"', "\\", "\n", "\x00", "\ud800"])
def test_errors_are_short_and_json(character):
    body = error_body(RequestError(character * 10_000, "p" * 10_000))
    assert len(body) <= 4096
    json.loads(body)
