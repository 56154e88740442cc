"""`PreparedRequest`: what the input processor makes of a prompt, or of several for a pooling model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.frontend.beam_search.rules import BeamRules
from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
from octavo.messages.request import EngineRequest
from octavo.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be sent: what the core gets, and what the output processor must know."""

    request_id: str
    """The client's name for it; only echoed."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    engine_requests: list[EngineRequest]
    """One per sequence; the first leads. Of a beam search: the first step; of a list of texts: one."""
    beam_rules: BeamRules | None = None
    """For a beam search."""
    lora_request: LoRARequest | LoRASum | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Its client's `traceparent` and `tracestate`."""
    encoder_prompt: str | None = None
    """Of an encoder-decoder that reads texts."""
    text_ids: Sequence[str] = ()
    """Of a list of texts: the clients' names for their outputs; `request_id` is that of all."""

    @property
    def key(self) -> str:
        """Unique, unlike the client's name."""
        return self.engine_requests[0].request_id
