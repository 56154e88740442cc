"""`pin_prefix`: keeps a prefix in the cache of a running engine. Also the file of those to keep.

Called by the operators' routes and at the start of a server. What is not in the cache yet is computed first.
"""

from collections.abc import Iterator
from contextlib import aclosing
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from octavo.base.errors import ConfigError, OctavoError, Overloaded, RequestError
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.requests.options import RequestOptions, read_retention
from octavo.frontend.requests.prompts import PromptType, TokensPrompt
from octavo.messages.sampling import SamplingParams


class PinRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prefix that is to stay in the cache: text, token ids, or the messages it consists of."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    retention_s: float | None = None
    """Seconds after its last use; None: until it is released."""
    prefix_priority: int = 0
    """0 … 99: the least goes first where not all can stay."""

    def read(self, engine: AsyncLLM) -> PromptType:
        """Return the prefix as a prompt; takes time. Raises RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("A pin needs either prompt or messages.", "prompt")
        if self.messages is not None:
            return engine.chat.render(self.messages, add_generation_prompt=False)
        return self.prompt if isinstance(self.prompt, str) else {"prompt_token_ids": self.prompt or []}


async def pin_prefix(engine: AsyncLLM, pin: PinRequest, prompt: PromptType) -> dict[str, Any]:
    """Pin `prompt` in every replica, as `pin` says; return what `list_pins` will say of it.

    Raises RequestError for a prefix that is too short, or over the budget; Overloaded when the cache was too
    busy to keep it.
    """
    if not engine.config.cache.enable_prefix_caching:
        raise RequestError("Pins need the prefix cache: enable_prefix_caching=False turns it off.", "prompt")
    seconds = None if pin.retention_s is None else pin.retention_s
    retention = read_retention(seconds, pin.prefix_priority)
    assert retention is not None
    one = SamplingParams(max_tokens=1, detokenize=False)
    prepared = await engine.off_loop(lambda: engine.input_processor.process(prompt, one, RequestOptions()))
    [request] = prepared.engine_requests
    arguments = {
        "token_ids": request.prompt_token_ids,
        "cache_salt": request.sharing.cache_salt,
        "seconds": inf if seconds is None else retention.seconds,
        "priority": retention.priority,
    }
    ids = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
    if request.sharing.cache_salt:
        ids["cache_salt"] = request.sharing.cache_salt
    count = engine.input_processor.num_replicas
    ranks = [None] if count == 1 else range(count)
    try:
        pinned = await engine.core.call("pin_prefix", arguments)
        if pinned is None:
            for rank in ranks:
                keeps = {"retention_s": retention.seconds, "prefix_priority": 99, "data_parallel_rank": rank}
                async with aclosing(engine.generate(ids, one, **keeps)) as outputs:  # type: ignore[arg-type]
                    async for _ in outputs:
                        pass
            pinned = await engine.core.call("pin_prefix", arguments)
    except OctavoError as error:
        if type(error) not in (OctavoError, RequestError):
            raise
        raise RequestError(str(error).removeprefix("pin_prefix: "), "prompt") from None
    if pinned is None:
        raise Overloaded("The prefix left the cache before it was pinned: other requests need the blocks.")
    result: dict[str, Any] = pinned
    return result


async def preload_prefixes(engine: AsyncLLM, path: str) -> int:
    """Pin the prefixes of a file of JSON lines; return how many. Raises ConfigError, with the line."""
    count = 0
    for number, pin in _read_file(path):
        try:
            prompt = await engine.off_loop(lambda pin=pin: pin.read(engine))  # type: ignore[misc]
            await pin_prefix(engine, pin, prompt)
        except (RequestError, Overloaded) as error:
            raise ConfigError(f"preload_prefixes: {path}, line {number}: {error}") from None
        count += 1
    return count


def _read_file(path: str) -> Iterator[tuple[int, PinRequest]]:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"preload_prefixes: {path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=PinRequest)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"preload_prefixes: {path}, line {number}: {error}") from None
