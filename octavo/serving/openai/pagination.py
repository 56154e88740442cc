"""Lists of what the store holds, page by page: OpenAI's `limit`, `after`, `order`, and `has_more`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError
from octavo.serving.openai.answers import json_response

T = TypeVar("T")


class Page(msgspec.Struct):
    """Some of a list."""

    data: list[Any]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list."""

    limit: int
    after: str
    newest_first: bool

    @classmethod
    def of(cls, request: Request, default: int, most: int) -> "PageQuery":
        """Raises RequestError for a limit beyond `most`, or an order of another name."""
        given = request.query_params
        limit, order = given.get("limit", str(default)), given.get("order", "desc")
        if not (limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
            raise RequestError(f"limit must be a number from 1 to {most}, got {limit[:20]!r}.", "limit")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order[:20]!r}.", "order")
        return cls(int(limit), given.get("after", ""), order == "desc")

    def response(self, items: Sequence[T], show: Callable[[T], Any], name: Callable[[T], str]) -> Response:
        """The page that has the first of `items`, of which there is one too many when more follow.

        show: what is told of an item; name: its id
        """
        shown = items[: self.limit]
        page = Page([show(item) for item in shown], len(items) > self.limit)
        if shown:
            page.first_id, page.last_id = name(shown[0]), name(shown[-1])
        return json_response(page)
