"""What Ollama's clients ask and get: one struct per body. Names are Ollama's; times are in nanoseconds."""

from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.base.duration import seconds_of
from octavo.base.errors import RequestError, wrong
from octavo.serving.openai.answers import TokenLogprob
from octavo.serving.openai.protocol import Positive


class OllamaFields(Struct, kw_only=True):
    """What all requests have in common."""

    model: str
    options: dict[str, Any] | None = None
    """Sampling options; num_predict, repeat_penalty and the others mean here what they mean there."""
    keep_alive: float | str | None = None
    """How long the model stays loaded after this request: 300, "5m"; 0 = not at all, -1 = for good."""

    @property
    def keep_s(self) -> float | None:
        """The seconds of `keep_alive`. Raises RequestError."""
        if self.keep_alive in (None, ""):
            return None
        try:
            return seconds_of(self.keep_alive)
        except ValueError as error:
            raise RequestError(f"keep_alive: {self.keep_alive!r:.50} is {error}.", "keep_alive") from None


class WritingFields(OllamaFields, kw_only=True):
    """Of requests for text."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    """json, or a JSON schema."""
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChat(WritingFields, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = []
    """Without any, the model is loaded, or with keep_alive 0 unloaded."""
    tools: list[dict[str, Any]] | None = None

    @property
    def needs_model(self) -> bool:
        """Whether the model is to be loaded."""
        return bool(self.messages) or self.keep_s != 0


class OllamaGenerate(WritingFields, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    """Without one, the model is loaded, or with keep_alive 0 unloaded."""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    """The prompt is not put into the chat template."""
    images: list[str] | None = None
    """In base64."""
    context: list[int] | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if self.context:
            raise wrong("context", "is not supported: send the conversation to /api/chat")
        if self.template:
            raise wrong("template", "is not supported: give the server a --chat-template")

    @property
    def needs_model(self) -> bool:
        """Whether the model is to be loaded."""
        return bool(self.prompt) or self.keep_s != 0


class OllamaEmbed(OllamaFields, kw_only=True):
    """POST /api/embed."""

    input: str | list[str]
    truncate: bool | None = None
    """False: a text that is too long is an error."""
    dimensions: Positive | None = None


class OllamaEmbeddings(OllamaFields, kw_only=True):
    """POST /api/embeddings, the earlier form."""

    prompt: str


class OllamaShow(Struct, kw_only=True):
    """POST /api/show."""

    model: str = ""
    name: str = ""
    """An earlier name of `model`."""
    verbose: bool | None = None
    needs_model: ClassVar[bool] = False


class Call(Struct):
    """What is called, and with what."""

    name: str
    arguments: dict[str, Any]


class CallItem(Struct):
    """One call of a tool."""

    function: Call


class TurnMessage(Struct, kw_only=True):
    """The model's turn, or a piece of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[CallItem] | UnsetType = UNSET


class Written(Struct, kw_only=True):
    """An answer, or a line of its stream; `message` is chat's, `response` is generate's."""

    model: str
    created_at: str
    message: TurnMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Embedded(Struct):
    """The vectors of texts."""

    model: str
    embeddings: Any
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(Struct):
    """The vector of one text."""

    embedding: Any


class Details(Struct):
    """What a model is."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class Tag(Struct, kw_only=True):
    """A model that may be asked for; of /api/ps: one that is loaded."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class Tags(Struct):
    """Models."""

    models: list[Tag]


class Shown(Struct, kw_only=True):
    """One model in detail."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct):
    """The version of octavo."""

    version: str


class OllamaError(Struct):
    """What went wrong."""

    error: str


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ollama's messages as OpenAI's. Raises RequestError."""
    return [_message(message) for message in messages]


def content_of(text: Any, images: Any) -> Any:
    """Return OpenAI's content of a text with images before it, each in base64. Raises RequestError."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise wrong("images", "must be a list of base64 texts")
    urls = [{"url": f"data:image/x;base64,{image}"} for image in images]
    return [*({"type": "image_url", "image_url": url} for url in urls), {"type": "text", "text": text}]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key in ("role", "content")}
    made["content"] = content_of(made.get("content", ""), message.get("images"))
    if thinking := message.get("thinking"):
        made["reasoning"] = thinking
    if name := message.get("tool_name"):
        made["name"] = name
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {"id": call.get("id") or f"call_{i}", "type": "function", "function": call.get("function")}
            for i, call in enumerate(calls)
        ]
    return made
