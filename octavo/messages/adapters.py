"""Adapters of a model: as users name them, and as requests carry them to the workers."""

import struct
from operator import attrgetter

import msgspec

from octavo.base.errors import RequestError, wrong

MOST_SUMMED, MOST_SCALE = 16, 100.0


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter for a request. Public; the fields are vLLM's. Raises RequestError."""

    lora_name: str
    lora_int_id: int
    """Greater than 0; of one adapter."""
    lora_path: str = ""
    """A folder as PEFT saves it: adapter_config.json and adapter_model.safetensors."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Take the place of an adapter that was added under the same id."""
    is_3d_lora_weight: bool = False
    """Without an effect: the shapes say it."""
    adapter_id = property(attrgetter("lora_int_id"))
    name = property(attrgetter("lora_name"))
    path = property(attrgetter("lora_path"))

    def __post_init__(self) -> None:
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(f"id must be > 0, got {self.lora_int_id!r}", "lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise RequestError("lora_path cannot be empty", "lora_path")
        if not isinstance(self.lora_name, str) or not self.lora_name.isprintable() or not self.lora_name:
            raise wrong("lora_name", f"must be a printable string, got {self.lora_name!r:.100}")


class LoRASum(msgspec.Struct, frozen=True):
    """Several adapters for one request: what they change is added up, each times its scale. Public.

    Raises RequestError.
    """

    adapters: tuple[tuple[LoRARequest, float], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.adapters) <= MOST_SUMMED:
            text = f"A sum takes 1 to {MOST_SUMMED} adapters, got {len(self.adapters)}."
            raise RequestError(text, "lora")
        for adapter, scale in self.adapters:
            if not isinstance(adapter, LoRARequest) or not -MOST_SCALE <= scale <= MOST_SCALE:
                text = f"A sum takes adapters and scales up to {MOST_SCALE:g}, got {scale!r:.50}."
                raise RequestError(text, "lora")

    @property
    def lora_name(self) -> str:
        """Return the names of all."""
        return "+".join(adapter.lora_name for adapter, _ in self.adapters)


class PromptAdapterRequest(msgspec.Struct, frozen=True):
    """A learned prompt for a request. Public; the fields are those of early vLLM. Raises RequestError."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    """Greater than 0."""
    prompt_adapter_local_path: str = ""
    """A folder as PEFT saves it: adapter_config.json and adapter_model.safetensors."""
    prompt_adapter_num_virtual_tokens: int = 0
    """Without an effect: the folder says it."""
    task_id: int = 0
    """Which task of a multitask prompt."""

    def __post_init__(self) -> None:
        if type(self.prompt_adapter_id) is not int or self.prompt_adapter_id < 1:
            raise RequestError(f"id must be > 0, got {self.prompt_adapter_id!r}", "prompt_adapter_id")
        for name in ("prompt_adapter_local_path", "prompt_adapter_name"):
            if not isinstance(value := getattr(self, name), str) or not value.isprintable() or not value:
                raise wrong(name, f"must be a printable string, got {value!r:.100}")

    @property
    def lora_name(self) -> str:
        """Return its name, under the name that all adapters have for it."""
        return self.prompt_adapter_name


class AdapterPart(msgspec.Struct, array_like=True, frozen=True):
    """One adapter of a sum."""

    path: str
    digest: bytes
    """sha256 of its files: what is there under another digest is another adapter."""
    scale: float = 1.0


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """What a request computes with beside the model: the sum of these adapters."""

    name: str
    parts: tuple[AdapterPart, ...]
    start: int = 0
    """Position of the first token that it changes: of an activated adapter, where its invocation begins."""

    @property
    def key(self) -> bytes:
        """Return what the keys and values depend on: equal for equal contents, whatever their names."""
        return b"".join(part.digest + struct.pack("<d", part.scale) for part in self.parts)


class SoftPromptRef(msgspec.Struct, array_like=True, frozen=True):
    """Virtual tokens before a request's prompt, whose embeddings, or keys and values, were learned."""

    name: str
    path: str
    digest: bytes
    """sha256 of its files."""
    num_tokens: int
    """So many of the request's first tokens are virtual; their ids mean nothing."""
    task: int = 0

    @property
    def key(self) -> bytes:
        """Return what the keys and values depend on."""
        return self.digest + struct.pack("<q", self.task)
