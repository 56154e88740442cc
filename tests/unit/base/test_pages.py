"""Memory that is freed: kept for what comes next, then given back."""

import asyncio
import subprocess
import sys

import pytest

from octavo.frontend.admission import preparation
from octavo.frontend.admission.preparation import Preparation

_BLOCKS = """
import gc, psutil
from octavo.base.pages import return_freed_blocks, return_large_blocks

def resident():
    return psutil.Process().memory_info().rss >> 20

return_large_blocks()
before = resident()
blocks = [b"x" * (4 << 20) for _ in range(5)]
del blocks
kept = resident() - before
return_freed_blocks()
left = resident() - before
large = b"x" * (64 << 20)
del large
print(kept, left, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_blocks_are_kept_until_they_are_returned():
    """Blocks of 4 MiB as long as they are below 32 MiB; one of 64 goes at once."""
    done = subprocess.run([sys.executable, "-c", _BLOCKS], capture_output=True, text=True, check=True)
    kept, left, large = map(int, done.stdout.split())
    assert kept >= 16 and left <= 4 and large <= 8


async def test_media_return_their_memory_once(monkeypatch):
    returned = []
    monkeypatch.setattr(preparation, "return_freed_blocks", lambda: returned.append(1))
    monkeypatch.setattr(preparation, "_KEPT_S", 0.05)
    jobs = Preparation()
    assert await asyncio.gather(*(jobs.run_media(lambda n=n: n) for n in range(5))) == [*range(5)]
    assert await jobs.run(lambda: 5) == 5 and not returned
    await asyncio.sleep(0.2)
    assert returned == [1]
    await jobs.run_media(lambda: 6)
    await asyncio.sleep(0.2)
    assert returned == [1, 1]
