"""Logits processors that users bring: classes for the whole engine, functions for single requests.

The worker loads the classes by name (`load_processors`); the sampler runs all of them between logit_bias and
the penalties, where vLLM has them. Only functions of requests are called row by row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.base.registry import load_named
from octavo.config.engine import EngineConfig
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest
from octavo.runtime.sampling.batch_processor import BatchProcessor, Configs, LogitsProcessor, Make
from octavo.runtime.sampling.processors import Processor, ProcessorFactory, RowsFailed
from octavo.runtime.sampling.rows import Batch

_log = get_logger(__name__)

RequestLogitsProcessor = Callable[..., torch.Tensor]
"""(output_ids, logits) or (prompt_ids, output_ids, logits) → logits, [vocab_size] float32."""


@dataclass(slots=True)
class _Functions:
    """What one request brought, and what it is called with."""

    functions: Sequence[RequestLogitsProcessor]
    prompt_ids: list[int]
    output_ids: list[int]

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        """Put one row through all functions. Raises what they raise, TypeError for a wrong result."""
        shape = logits.shape
        for function in self.functions:
            if len(signature(function).parameters) == 3:
                logits = function(self.prompt_ids, self.output_ids, logits)
            else:
                logits = function(self.output_ids, logits)
            if not isinstance(logits, torch.Tensor) or logits.shape != shape:
                raise TypeError(f"it must return a tensor of {shape[0]} logits, not {_describe(logits)}")
        return logits


class RowProcessor(Processor):
    """A processor made of functions that see one request's row each."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._held: dict[int, _Functions] = {}

    @abstractmethod
    def functions(self, params: SamplingParams) -> Sequence[RequestLogitsProcessor]:
        """Return the functions of a request, in their order."""

    def is_active(self, params: SamplingParams) -> bool:
        return bool(self.functions(params))

    def add(self, row: int, request: NewRequest) -> None:
        outputs = request.token_ids[request.num_prompt_tokens :]
        self._held[row] = _Functions(self.functions(request.sampling), request.prompt_ids, outputs)

    def remove(self, row: int) -> None:
        self._held.pop(row, None)

    def apply(self, logits: torch.Tensor, batch: Batch) -> None:
        """Process one row after the other; the failure of one is no other's."""
        failed: dict[int, str] = {}
        for logit_row, row in zip(batch.logit_rows.tolist(), batch.rows.tolist(), strict=True):
            try:
                logits[logit_row] = self._held[row].process(logits[logit_row])
            except Exception as error:
                _log.warning("A logits processor failed.", exc_info=True)
                failed[row] = f"The request's logits processor failed: {type(error).__name__}: {error}"
        if failed:
            raise RowsFailed(failed)

    def observe(self, batch: Batch, token_ids: torch.Tensor) -> None:
        for row, token_id in zip(batch.rows.tolist(), token_ids.tolist(), strict=True):
            self._held[row].output_ids.append(token_id)


class RequestFunctions(RowProcessor):
    """`SamplingParams.logits_processors`."""

    def functions(self, params: SamplingParams) -> Sequence[RequestLogitsProcessor]:
        return params.logits_processors or ()


class AdapterLogitsProcessor(ABC):
    """Base of users' classes that make a function for each request; vLLM's class of this name."""

    def __init__(self, vllm_config: Configs, device: torch.device, is_pin_memory: bool) -> None:
        """Set the adapter up. is_pin_memory: whether copies to the device may be asynchronous."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request that it cannot serve."""

    def is_argmax_invariant(self) -> bool:
        """Return True if the greedy token stays the same. octavo applies the functions in any case."""
        return False

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return a new function for a request, or None. May be called more than once for it."""


class _Adapted(RowProcessor):
    """The functions that a user's adapter makes."""

    def __init__(
        self, make: Make[AdapterLogitsProcessor], vocab_size: int, num_rows: int, device: torch.device
    ) -> None:
        super().__init__(vocab_size, num_rows, device)
        self._adapter = make(device, False)

    def functions(self, params: SamplingParams) -> Sequence[RequestLogitsProcessor]:
        function = self._adapter.new_req_logits_processor(params)
        return () if function is None else (function,)


def load_processors(config: EngineConfig) -> list[ProcessorFactory]:
    """Return the engine's classes, named package.module:Class. Raises ConfigError."""
    return [_load(name, config) for name in config.model.logits_processors]


def _load(name: str, config: EngineConfig) -> ProcessorFactory:
    kind = load_named(name, "logits_processors")
    if isinstance(kind, type) and issubclass(kind, LogitsProcessor):
        return partial(BatchProcessor, partial(kind, Configs.of(config)))
    if isinstance(kind, type) and issubclass(kind, AdapterLogitsProcessor):
        return partial(_Adapted, partial(kind, Configs.of(config)))
    if isinstance(kind, type) and issubclass(kind, Processor):
        return kind
    raise ConfigError(
        f"logits_processors: {name} is not derived from octavo.LogitsProcessor, "
        "octavo.AdapterLogitsProcessor or octavo.logits_processor.LogitsProcessor."
    )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
