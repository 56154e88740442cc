"""Answers of the synchronous engine that may also be awaited, as in vLLM's first `LLMEngine`.

    request_id = await engine.add_request(prompt="Hello", sampling_params=SamplingParams())
    completed = await engine.step()

The work is done by the call, in the caller's thread; `await` lets other tasks of the event loop run once. An
engine that computes beside the event loop is `AsyncLLM`.
"""

import asyncio
from collections.abc import Generator
from typing import Any

from octavo.frontend.outputs.request_output import RequestOutput


class RequestId(str):
    """A request's id; awaited, the same."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, str]:
        yield from asyncio.sleep(0).__await__()
        return str(self)


class StepOutputs(list[RequestOutput]):
    """What a step brought, by request; awaited, only the requests that it completed."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, list[RequestOutput]]:
        yield from asyncio.sleep(0).__await__()
        return [output for output in self if output.finished]
