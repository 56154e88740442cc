"""Ways to ask a server, by `vllm bench serve`'s names: the path, the body, whether the answer streams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.bench.generated import Sample


@dataclass(frozen=True)
class Backend:
    """One kind of endpoint."""

    endpoint: str
    body: Callable[[Sample, str], dict[str, Any]]
    """The request for a sample and the name of a model."""
    text: Callable[[dict[str, Any]], str | None] | None = None
    """The text of a chunk's choice; None: the answer comes whole, and is no text."""
    takes_ids: bool = False
    """Prompts may be token ids."""
    num_queries: int = 0
    """How many of a request's inputs are no documents."""

    @property
    def streams(self) -> bool:
        """Whether answers come as events, token by token."""
        return self.text is not None

    def num_inputs(self, given: int) -> int:
        """Return how many inputs of a request count, of as many as its prompt lists."""
        return 1 if self.streams else given - self.num_queries


def _completion(sample: Sample, model: str) -> dict[str, Any]:
    return _stream(model) | {
        "prompt": sample.prompt,
        "max_tokens": sample.output_len,
        "repetition_penalty": 1.0,
    }


def _chat(sample: Sample, model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": sample.prompt}]}]
    return _stream(model) | {"messages": messages, "max_completion_tokens": sample.output_len}


def _stream(model: str) -> dict[str, Any]:
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}}


def _embedding(sample: Sample, model: str) -> dict[str, Any]:
    return {"model": model, "input": sample.prompt, "truncate_prompt_tokens": -1}


def _ranking(sample: Sample, model: str) -> dict[str, Any]:
    texts = sample.prompt
    return {"model": model, "query": texts[0], "documents": texts[1:], "truncate_prompt_tokens": -1}


_completions = Backend("/v1/completions", _completion, lambda choice: choice.get("text"), takes_ids=True)
BACKENDS = {
    "openai": _completions,
    "vllm": _completions,
    "openai-chat": Backend(
        "/v1/chat/completions", _chat, lambda choice: (choice.get("delta") or {}).get("content")
    ),
    "openai-embeddings": Backend("/v1/embeddings", _embedding),
    "vllm-rerank": Backend("/v1/rerank", _ranking, num_queries=1),
}
BACKENDS["rerank"] = BACKENDS["vllm-rerank"]
