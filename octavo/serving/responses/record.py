"""Responses in the store: each is a document with the conversation before it, so that none depends on others.

Used by the routes of `responses`. One that is worked on in the background is held until it is done.
"""

from typing import Any

import msgspec
from msgspec import Struct

from octavo.serving.openai.answers import encode
from octavo.serving.responses.answers import Fault, Response
from octavo.serving.responses.protocol import Item
from octavo.serving.store.transaction import Document, Transaction

_OPEN = ("queued", "in_progress")


class StoredResponse(Struct):
    """What is kept."""

    response: Response
    history: list[Item]
    """Items before the request's."""
    input: list[Item]
    """The request's."""

    def conversation(self) -> list[Item]:
        """All items to the end of the answer."""
        output: list[dict[str, Any]] = msgspec.to_builtins(self.response.output)
        return self.history + self.input + output


def add(transaction: Transaction, tenant: str, stored: StoredResponse) -> None:
    """Keep one. Raises HTTPError 507."""
    is_open = stored.response.status in _OPEN
    transaction.add("response", stored.response.id, tenant, encode(stored), is_held=is_open)


def find(transaction: Transaction, tenant: str, response_id: str) -> StoredResponse:
    """Raises HTTPError 404."""
    return _read(transaction.find("response", response_id, tenant))


def settle(transaction: Transaction, tenant: str, stored: StoredResponse) -> Response:
    """One that was open is done, unless somebody else has ended it; how it ended."""
    kept = find(transaction, tenant, stored.response.id)
    if kept.response.status not in _OPEN:
        return kept.response
    return _keep(transaction, stored)


def cancel(transaction: Transaction, tenant: str, response_id: str) -> Response:
    """End one; what is done already stays as it is."""
    stored = find(transaction, tenant, response_id)
    if stored.response.status in _OPEN:
        stored.response.status = "cancelled"
        _keep(transaction, stored)
    return stored.response


def fail_left(transaction: Transaction) -> None:
    """Nobody works any more on those that are open: they were a server's that has ended."""
    for document in transaction.held("response"):
        stored = _read(document)
        stored.response.status = "failed"
        stored.response.error = Fault("The server ended before the response was done.")
        _keep(transaction, stored)


def _keep(transaction: Transaction, stored: StoredResponse) -> Response:
    """Write down one that was open, and may be so still."""
    transaction.replace(stored.response.id, encode(stored))
    if stored.response.status not in _OPEN:
        transaction.release(stored.response.id)
    return stored.response


def _read(document: Document) -> StoredResponse:
    return msgspec.json.decode(document.content, type=StoredResponse)
