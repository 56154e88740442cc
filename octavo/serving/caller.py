"""`Caller`: what every handler needs to know of a request besides its body. Made from the ASGI scope."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from starlette.requests import HTTPConnection

from octavo.base.errors import RequestError
from octavo.config.server import ServerConfig
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.requests.prompts import PromptType
from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
from octavo.serving.adapters import Scales
from octavo.serving.engines import Engines

_TRACE_HEADERS = ("traceparent", "tracestate")
_RANK_HEADER = "x-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and of whom. The middleware has put id, tenant and salt into the scope."""

    engines: Engines
    config: ServerConfig
    request_id: str
    tenant: str
    """Whose key it was; empty without keys."""
    cache_salt: str
    """Keeps the tenants' cached prompts apart."""
    trace_headers: Mapping[str, str]
    """The caller's place in a trace."""
    is_admin: bool = True
    """Whether it was an admin's key; without keys everybody is one."""
    in_bulk: bool = False
    """Whether it is one of many that nobody waits for: a line of a batch, a response in the background."""
    data_parallel_rank: int | None = None
    """The replica that is to answer."""
    model: str = ""
    """The name under which a model is asked: of the query, as long as the body is not read; may be empty."""

    lora: LoRARequest | LoRASum | None = None
    """What changes the model."""
    learned_prompt: PromptAdapterRequest | None = None
    """What stands before its prompts."""

    @property
    def engine(self) -> AsyncLLM:
        """The engine that is asked."""
        return self.engines.of(self.model)

    @classmethod
    def of(cls, connection: HTTPConnection) -> "Caller":
        """The caller on this connection."""
        state = connection.scope.get("state", {})
        app = connection.app.state
        request_id = state.get("request_id") or uuid4().hex
        return cls(
            app.engines,
            app.config,
            request_id,
            state.get("tenant", ""),
            state.get("cache_salt", ""),
            {name: connection.headers[name] for name in _TRACE_HEADERS if name in connection.headers},
            state.get("is_admin", True),
            data_parallel_rank=_rank_of(connection.headers.get(_RANK_HEADER)),
            model=connection.query_params.get("model", ""),
        )

    def asking(self, model: str | None, lora: Scales = None) -> "Caller":
        """The same caller, who asks this model, or adapters of it. Raises UnknownModel, RequestError."""
        name = self.engines.resolve(model or self.model)
        adapter, prompt = self.engines.adapter_of(name, lora)
        return replace(self, model=name, lora=adapter, learned_prompt=prompt)

    def salted(self, prompt: PromptType, salt: str | None) -> PromptType:
        """The prompt with the tenant's salt and the request's own, so that no request can name another's."""
        salt = "/".join(part for part in (self.cache_salt, salt) if part)
        if not salt:
            return prompt
        if isinstance(prompt, str):
            return {"prompt": prompt, "cache_salt": salt}
        if isinstance(prompt, list):
            return {"prompt_token_ids": prompt, "cache_salt": salt}
        return {**prompt, "cache_salt": salt}  # type: ignore[return-value]  # the same kind of prompt

    def is_in_bulk(self, num_prompts: int) -> bool:
        """Whether a request of so many prompts must leave seats to others: nobody waits for each of them."""
        return self.in_bulk or num_prompts > max(1, self.engine.config.scheduler.max_num_seqs // 4)


def _rank_of(text: str | None) -> int | None:
    """Return the replica that a header names. Raises RequestError for anything but a number."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError(f"X-data-parallel-rank must be the number of a replica, got {text[:20]!r}.")
    return int(text)
