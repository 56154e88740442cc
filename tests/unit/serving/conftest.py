"""One server without a model for each module; its tests share the module's event loop."""

import pytest_asyncio

from tests.serving import served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with served() as running:
        yield running
