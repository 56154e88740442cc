"""What the link to the core does between two steps of it."""

import asyncio
from types import SimpleNamespace

from octavo.frontend.core_link import CoreLink


async def test_many_new_requests_leave_others_their_turn():
    """A search sends a request for each beam; one that ends in the meantime sends no more."""
    sent, owners, turns = [], {f"r-{i}": "key" for i in range(64)}, 0
    link = CoreLink.__new__(CoreLink)
    link.client = SimpleNamespace(add=lambda request: sent.append(request.request_id))
    link.processor = SimpleNamespace(owner_of=owners.get)

    async def other():
        nonlocal turns
        while len(sent) < 40:
            turns += 1
            await asyncio.sleep(0)
        for i in range(32, 64):
            del owners[f"r-{i}"]

    requests = [SimpleNamespace(request_id=name) for name in list(owners)]
    await asyncio.gather(link._send_requests(requests), other())
    assert turns >= 2
    assert 40 <= len(sent) < 64
    assert sent == [f"r-{i}" for i in range(len(sent))]
