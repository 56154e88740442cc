"""What the store holds, for its routes: one document, or lists by OpenAI's `limit`, `after`, `order`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import wrong
from octavo.serving.caller import Caller
from octavo.serving.openai.answers import json_response
from octavo.serving.store.transaction import Document, Kind

T = TypeVar("T")


async def in_store(request: Request, work: Callable[..., T], **values: Any) -> T:
    """The result of `work` in a transaction, given the caller's tenant and what the path names."""
    named = {"tenant": Caller.of(request).tenant, **request.path_params, **values}
    result: T = await request.app.state.store.run(partial(work, **named))
    return result


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
            raise wrong("limit", f"must be a number from 1 to {most}, got {limit[:20]!r}")
        if order not in ("asc", "desc"):
            raise wrong("order", f"must be asc or desc, got {order[:20]!r}")
        return cls(int(limit), given.get("after", ""), order == "desc")

    async def documents(
        self, request: Request, kind: Kind, wanted: Callable[[Document], bool] = lambda document: True
    ) -> list[Document]:
        """For `response`: the caller's documents of a kind."""
        tenant = Caller.of(request).tenant
        found: list[Document] = await request.app.state.store.run(
            lambda transaction: transaction.page(
                kind,
                tenant,
                after=self.after,
                limit=self.limit + 1,
                newest_first=self.newest_first,
                wanted=wanted,
            )
        )
        return found

    def response(self, items: Sequence[T], name: Callable[[T], str]) -> Response:
        """The page that has the first of `items`, of which there is one too many when more follow.

        name: the id of an item
        """
        shown = list(items[: self.limit])
        page = Page(shown, len(items) > self.limit)
        if shown:
            page.first_id, page.last_id = name(shown[0]), name(shown[-1])
        return json_response(page)
