"""What a client may ask of a pooling model: a struct per request body. Names follow OpenAI's, then vLLM's."""

from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct

from octavo.serving.openai.protocol import MAX_MESSAGES, Message, Positive, Priority, RequestFields

T = TypeVar("T")
MAX_INPUTS = 8192
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
Input = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
                {"type": "array", "items": {"type": "object"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "object"}}, "minItems": 1},
                {"type": "null"},
            ]
        }
    ),
]
"""A text, token ids, or a list of either; a conversation, or a list of them."""
Chats = Annotated[
    list[Message | Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]],
    Meta(min_length=1, max_length=MAX_INPUTS),
]
"""A conversation, or a list of them."""


class PoolingFields(RequestFields, kw_only=True):
    """What all requests to pooling models have in common."""

    use_activation: bool | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    """Has no effect: texts are padded where the model was trained so (SigLIP), and nowhere else."""


Encoding = Literal["float", "base64", "bytes", "bytes_only"]
NumberType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder = Literal["native", "little", "big"]


class EmbeddingFormat(NamedTuple):
    """How vectors are written."""

    encoding: Encoding | None = None
    dtype: NumberType | None = None
    order: ByteOrder | None = None


class InputFields(PoolingFields, kw_only=True):
    """Texts, or conversations."""

    input: Input = None
    messages: Chats | None = None
    """Laid out by the chat template."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: str | None = None
    """Which of the model's prompts (config_sentence_transformers.json) stands before each text."""


class EmbeddingRequest(InputFields, kw_only=True):
    """POST /v1/embeddings."""

    encoding_format: Encoding | None = None
    embed_dtype: NumberType | None = None
    """Of base64 and bytes."""
    endianness: ByteOrder | None = None
    dimensions: int | None = None

    @property
    def form(self) -> EmbeddingFormat:
        """How the answer is to be written."""
        return EmbeddingFormat(self.encoding_format, self.embed_dtype, self.endianness)


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling: any task."""

    task: str | None = None
    step_tag_id: Annotated[int, Meta(ge=0)] | None = None


class ClassificationRequest(InputFields, kw_only=True):
    """POST /classify."""


class PairFields(PoolingFields, kw_only=True):
    """What scores of two texts have in common."""

    max_tokens_per_query: Positive | None = None
    """Keep so many tokens of each text that documents are compared with."""
    max_tokens_per_doc: Positive | None = None
    instruction: str | None = None
    """For rerankers that are told what to look for."""


class ScoreRequest(PairFields, kw_only=True):
    """POST /score: pairs of texts, 1:1, 1:N or N:N, in one of four spellings."""

    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None


class RerankRequest(PairFields, kw_only=True):
    """POST /rerank: documents, those that fit the query best first (Jina, Cohere)."""

    query: str
    documents: Annotated[list[str | dict[str, str]], Meta(min_length=1, max_length=MAX_INPUTS)]
    """Texts, or objects with one."""
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """0 = all."""
    return_documents: bool | None = None


class CohereEmbedRequest(Struct, kw_only=True):
    """POST /v1/embed, /v2/embed."""

    model: str | None = None
    texts: Texts | None = None
    images: Texts | None = None
    """URLs of pictures."""
    inputs: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    """Texts with pictures: objects with content, a list of parts."""
    max_tokens: Positive | None = None
    input_type: str | None = None
    """The name of one of the model's prompts, if it has such prompts."""
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """END unless said."""
    priority: Priority | None = None


class PoolingUsage(Struct):
    """Tokens of the whole request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Results(Struct, Generic[T]):
    """What came of all texts, in order."""

    id: str
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Item(Struct):
    """The result of one text. embedding: floats, or base64 of numbers"""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(Results[Item]):
    """The vectors of all texts, in order."""


class PooledItem(Struct):
    """The result of one text: numbers, nested where each token has some, or base64 of them."""

    index: int
    data: Any
    object: Literal["pooling"] = "pooling"


class PooledData(Results[PooledItem]):
    """The results of all texts, in order."""


class ClassItem(Struct):
    """The best label of one text, and what each label has."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classification(Results[ClassItem]):
    """The labels of all texts, in order."""


class ScoreItem(Struct):
    """How well one pair fits."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Results[ScoreItem]):
    """The scores of all pairs, in order."""


class RankedDocument(Struct):
    """A document."""

    text: str


class Ranked(Struct, omit_defaults=True):
    """A document and how well it fits the query."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(Struct):
    """The documents, the best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


class CohereEmbeddings(Struct):
    """Vectors by type."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class CohereFloats(Struct):
    """Vectors."""

    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_floats"] = "embeddings_floats"
