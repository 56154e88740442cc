"""`PoolingConfig`: how a pooling model makes vectors or scores of its hidden states; decided at the start.

`read_pooling` looks at what the user said (runner, convert, pooler_config), at the architecture's name, and
at what a Sentence-BERT folder says (`sentence_bert`). What is asked for and not known is refused.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.base.errors import ConfigError, Unsupported
from octavo.config.checkpoint import Checkpoint
from octavo.config.pair_templates import PAIR_TEMPLATES_OF
from octavo.config.sentence_bert import MODES, Folder, Stage
from octavo.config.token_ids import find_tokens
from octavo.messages.pooling import PoolingTask

_ENCODER_NAMES = {
    "BertModel": "Bert",
    "DistilBertModel": "DistilBert",
    "GteModel": "Gte GteNew New",
    "JinaEmbeddingsV3Model": "JinaEmbeddingsV3",
    "MPNetModel": "MPNet",
    "ModernBertModel": "ModernBert",
    "NomicBertModel": "NomicBert",
    "RobertaModel": "BgeM3Embedding Camembert Roberta XLMRoberta",
}
ENCODERS = {name: model for model, names in _ENCODER_NAMES.items() for name in names.split()}
"""Bidirectional families, by the beginning of their architectures' names."""
COLBERTS = {
    "HF_ColBERT": "BertModel",
    "ColBERTModel": "BertModel",
    "ColBERTModernBertModel": "ModernBertModel",
}
"""Late interaction: one vector per token, behind a projection."""
_COLQWEN_FORMS = {
    "text_form": "Query: {}" + "<|endoftext|>" * 10 + "\n",
    "image_form": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>",
}
_BGE_M3 = "BgeM3EmbeddingModel"
_COLQWEN = "ColQwen2ForRetrieval"
_CONTRASTIVE = ("CLIPModel", "SiglipModel")
"""Of texts and pictures, whose vectors are one space."""
BIDIRECTIONAL = {"LlamaBidirectionalModel": "LlamaForCausalLM", "GteQwen2Model": "Qwen2ForCausalLM"}
"""Causal families without their mask."""
_ENDS = re.compile(
    r"(Text)?(For(?P<head>CausalLM|MaskedLM|SequenceClassification|TokenClassification|RewardModel)"
    r"|(?<!LMHead)Model)$"
)
_MODE_NAMES = {"MEAN": "mean", "CLS": "cls", "LAST": "lasttoken", "MAX": "max"} | {m: m for m in MODES}
_GGUF_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
_CLASSIFIERS = ("SequenceClassification", "TokenClassification", "RewardModel")


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear layer that makes a task's vectors of the hidden states of tokens; its name in checkpoints.

    skips_first, skips_last: special tokens that have no vector
    """

    task: PoolingTask
    name: str
    outputs: int
    bias: bool = False
    relu: bool = False
    skips_first: int = 0
    skips_last: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """The decisions. Tasks: what requests may ask for, the first unless they say."""

    architecture: str
    """Of what computes hidden states, as in the registry of models."""
    tasks: tuple[PoolingTask, ...]
    is_causal: bool
    """Tokens see earlier ones only."""
    modes: tuple[str, ...] = ("mean",)
    """Of sentence_bert.MODES; the vectors of several are joined."""
    include_prompt: bool = True
    stages: tuple[Stage, ...] = ()
    """Behind pooling, in order."""
    normalize: bool = True
    """Embeddings have length 1, unless a request asks for others."""
    activation: str = "identity"
    """Of scores: identity, sigmoid or softmax."""
    sparse: Literal["", "max", "sum"] = ""
    """Embeddings are weights of the vocabulary's tokens (SPLADE), their largest or sum over the text."""
    sparse_logs: int = 1
    projections: tuple[Projection, ...] = ()
    """Of tasks that have a layer of their own."""
    skipped_tokens: tuple[int, ...] = ()
    """Tokens of documents whose vectors count for no score."""
    label_tokens: tuple[int, ...] = ()
    """The logits of these tokens are those of the labels."""
    is_log_odds: bool = False
    """Of two, (no, yes), there is one label: the difference."""
    pair_template: str = ""
    """Of config.pair_templates, by which two texts become a prompt; "" = as the tokenizer pairs texts."""
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] | None = None
    """That embeddings may be cut to; (): any; None: it is not a Matryoshka model."""
    embedding_size: int = 0
    enable_chunked_processing: bool = False
    """Longer texts than the model takes are embedded in pieces."""
    is_contrastive: bool = False
    """A prompt is a text or a picture, whose encoder makes the vector itself."""
    padded_to: tuple[int, int] = (0, 0)
    """So many tokens a text gets at least, by one of this id."""
    text_form: str = "{}"
    """How a text was asked in training; {} stands for it."""
    image_form: str = ""
    """What stood around an image alone."""
    max_embed_len: int = 0
    """The longest of them, in tokens; 0 = any."""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    """Name of the prompt that texts get; "" = none."""

    @property
    def is_embedder(self) -> bool:
        """Return True if results are vectors of the model's space, not scores of labels."""
        return self.tasks[0] in ("embed", "token_embed")

    @property
    def has_head(self) -> bool:
        """Return True if results come of logits over the vocabulary."""
        return bool(self.sparse or self.label_tokens)

    @property
    def reads_prefix(self) -> bool:
        """Return True if results depend on the last token's state alone: a cache may have the others."""
        return self.is_causal and self.modes == ("lasttoken",)


def read_pooling(
    runner: str, convert: str, given: dict[str, Any], checkpoint: Checkpoint, folder: Folder
) -> PoolingConfig | None:
    """Return how the model pools; None if it generates. Raises ConfigError, Unsupported."""
    found = _ENDS.search(checkpoint.architecture)
    own = (*COLBERTS, _COLQWEN)
    head = (found["head"] or "") if found else "" if checkpoint.architecture in own else "CausalLM"
    told = ("classifier_from_token", "gguf_pooling_type")
    is_pooling = folder.is_pooling or any(checkpoint.config.get(key) for key in told)
    generates = head == "CausalLM" and not is_pooling
    if runner == "generate" or (runner == "auto" and generates and convert in ("auto", "none")):
        if not generates:
            raise ConfigError(
                f"{checkpoint.architecture} does not generate text: leave out runner='generate', or use "
                "runner='pooling'."
            )
        return None
    if convert == "none" and generates:
        raise ConfigError("runner='pooling' with convert='none' needs a pooling model: use convert='embed'.")
    return _with_overrides(_decide(checkpoint, folder, head, convert), given)


def _decide(checkpoint: Checkpoint, folder: Folder, head: str, convert: str) -> PoolingConfig:
    config, name = checkpoint.text_config, checkpoint.architecture
    if name in _CONTRASTIVE:
        return _contrastive(checkpoint, is_clip=name == "CLIPModel")
    encoder = COLBERTS.get(name) or ENCODERS.get(_family(name))
    causal_name = BIDIRECTIONAL.get(name) or _ENDS.sub("ForCausalLM", name)
    sees_all = config.get("use_bidirectional_attention") or config.get("is_causal") is False
    common: dict[str, Any] = {
        "architecture": encoder or causal_name,
        "is_causal": not (encoder or name in BIDIRECTIONAL or sees_all),
    }
    tokens, is_log_odds = _label_tokens(checkpoint, folder)
    if tokens:
        return PoolingConfig(**common, **_token_classifier(checkpoint, tokens, is_log_odds))
    if head in _CLASSIFIERS or convert == "classify":
        classifier = _classifier(checkpoint, head, folder, is_encoder=bool(encoder))
        return PoolingConfig(**common, **classifier)
    common |= {"prompts": folder.prompts, "default_prompt": folder.default_prompt}
    if folder.sparse or (head == "MaskedLM" and not folder.is_pooling):
        common |= {"sparse": folder.sparse or "max", "sparse_logs": folder.sparse_logs}
        size = checkpoint.vocab_size
        return PoolingConfig(**common, tasks=("embed",), normalize=False, embedding_size=size)
    projections = _projections(checkpoint)
    is_late = folder.is_multi_vector or name in COLBERTS or name == _COLQWEN
    common |= _COLQWEN_FORMS if name == _COLQWEN else {}
    dimensions = config.get("matryoshka_dimensions")
    size = folder.output_size or checkpoint.embedding_size
    usual = "mean" if sees_all else "cls" if encoder else "lasttoken"
    per_token: tuple[PoolingTask, ...] = ("token_embed", "token_classify")
    return PoolingConfig(
        **common,
        tasks=("token_embed",) if is_late else ("embed", *per_token[: max(1, len(projections))]),
        modes=folder.modes or _gguf_modes(config) or (usual,),
        include_prompt=folder.include_prompt,
        stages=folder.stages[:-1] if folder.normalizes else folder.stages,
        normalize=folder.normalizes or not folder.is_pooling,
        dimensions=tuple(dimensions) if dimensions else () if config.get("is_matryoshka") else None,
        embedding_size=projections[0].outputs if is_late and projections else size,
        projections=projections,
        skipped_tokens=tuple(find_tokens(checkpoint.path, folder.skipped_words, some=True)),
    )


def _contrastive(checkpoint: Checkpoint, *, is_clip: bool) -> PoolingConfig:
    """Return how CLIP and SigLIP embed: texts of the latter are as long as those of their training."""
    config, width = checkpoint.text_config, checkpoint.embedding_size
    padding = checkpoint.max_position_embeddings, config.get("pad_token_id", 1)
    size = config["projection_dim"] if is_clip else config.get("projection_size") or width
    return PoolingConfig(
        architecture=checkpoint.architecture,
        is_causal=is_clip,
        tasks=("embed",),
        modes=("lasttoken",),
        embedding_size=size,
        is_contrastive=True,
        padded_to=(0, 0) if is_clip else padding,
    )


def _gguf_modes(config: dict[str, Any]) -> tuple[str, ...]:
    """Return what a GGUF file says. Raises Unsupported for what makes no vectors of texts."""
    kind = config.get("gguf_pooling_type")
    if kind is None or kind in _GGUF_MODES:
        return () if kind is None else (_GGUF_MODES[kind],)
    raise Unsupported(
        f"The GGUF file's pooling_type is {kind}; supported are 1 (mean), 2 (cls) and 3 (last token). "
        "hf_overrides={'gguf_pooling_type': 1} sets another."
    )


def _projections(checkpoint: Checkpoint) -> tuple[Projection, ...]:
    """Return the layers of tokens that an architecture has."""
    config = checkpoint.text_config
    if checkpoint.architecture in COLBERTS:
        told = [config.get(key) for key in ("colbert_dim", "dim", "projection_dim")]
        size = next((size for size in told if isinstance(size, int) and 0 < size < 1 << 16), 128)
        return (Projection(task="token_embed", name="linear", outputs=size),)
    if checkpoint.architecture == _COLQWEN:
        size = int(checkpoint.config.get("embedding_dim") or 128)
        return (Projection(task="token_embed", name="embedding_proj_layer", outputs=size, bias=True),)
    if checkpoint.architecture == _BGE_M3:
        size = checkpoint.embedding_size
        vectors = Projection(
            task="token_embed", name="colbert_linear", outputs=size, bias=True, skips_first=1
        )
        weights = replace(vectors, task="token_classify", name="sparse_linear", outputs=1)
        return vectors, replace(weights, relu=True, skips_last=1)
    return ()


def _label_tokens(checkpoint: Checkpoint, folder: Folder) -> tuple[tuple[int, ...], bool]:
    """Return the tokens whose logits are the labels', and whether the label is their difference."""
    if folder.label_tokens:
        return folder.label_tokens, len(folder.label_tokens) == 2
    config = checkpoint.config
    given = config.get("classifier_from_token") or []
    is_odds = bool(config.get("is_original_qwen3_reranker")) or config.get("method") == "from_2_way_softmax"
    if not isinstance(given, list) or not all(isinstance(token, str) for token in given):
        raise ConfigError(f"classifier_from_token must be a list of tokens, got {given!r:.100}.")
    if is_odds and len(given) != 2:
        raise ConfigError(f"classifier_from_token must name two tokens, (no, yes), got {given!r:.100}.")
    return tuple(find_tokens(checkpoint.path, given)), is_odds


def _token_classifier(checkpoint: Checkpoint, tokens: tuple[int, ...], is_log_odds: bool) -> dict[str, Any]:
    num_labels = 1 if is_log_odds else len(tokens)
    return {
        "tasks": ("classify", "token_classify"),
        "modes": ("lasttoken",),
        "normalize": False,
        "num_labels": num_labels,
        "label_tokens": tokens,
        "is_log_odds": is_log_odds,
        "activation": _activation(checkpoint.config, num_labels),
        "pair_template": _pair_template(checkpoint.architecture, num_labels),
    }


def _pair_template(architecture: str, num_labels: int) -> str:
    return PAIR_TEMPLATES_OF.get(_family(architecture), "") if num_labels == 1 else ""


def _family(architecture: str) -> str:
    return _ENDS.sub("", architecture)


def _classifier(checkpoint: Checkpoint, head: str, folder: Folder, *, is_encoder: bool) -> dict[str, Any]:
    config = checkpoint.config
    names = config.get("id2label") or {}
    num_labels = len(names) or int(config.get("num_labels") or (1 if head == "RewardModel" else 2))
    per_token = head == "TokenClassification"
    return {
        "tasks": ("token_classify",) if per_token else ("classify", "token_classify"),
        "modes": (_classifier_mode(config),) if is_encoder else ("lasttoken",),
        "normalize": False,
        "num_labels": num_labels,
        "labels": tuple(str(names[key]) for key in sorted(names, key=int)),
        "activation": "identity"
        if head == "RewardModel"
        else _activation(config, num_labels, folder.activation),
        "pair_template": _pair_template(checkpoint.architecture, num_labels) if not is_encoder else "",
    }


def _classifier_mode(config: dict[str, Any]) -> str:
    mode = config.get("classifier_pooling") or "cls"
    if mode not in ("cls", "mean"):
        raise ConfigError(f"config.json: classifier_pooling {mode!r:.99} is not supported, cls and mean are.")
    return str(mode)


def _activation(config: dict[str, Any], num_labels: int, given: str = "") -> str:
    """Return what turns logits into scores. Raises ConfigError for a class that is not known."""
    nested = config.get("sentence_transformers")
    told = given or (nested or {}).get("activation_fn") or config.get("sbert_ce_default_activation_function")
    if told:
        known = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        name = str(told).removeprefix("torch.nn.modules.activation.").removeprefix("torch.nn.modules.linear.")
        if name not in known:
            raise ConfigError(
                f"config.json: activation_fn {told!r:.100} is not supported, {', '.join(known)} are."
            )
        return known[name]
    is_sigmoid = num_labels == 1 or config.get("problem_type") == "multi_label_classification"
    return (
        "identity" if config.get("problem_type") == "regression" else "sigmoid" if is_sigmoid else "softmax"
    )


def _with_overrides(config: PoolingConfig, given: dict[str, Any]) -> PoolingConfig:
    """Return the config as `pooler_config` changes it. Raises ConfigError."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        match name:
            case "pooling_type" | "seq_pooling_type":
                if value not in _MODE_NAMES:
                    known = ", ".join(_MODE_NAMES)
                    raise ConfigError(f"pooler_config: {name}={value!r} is not one of {known}.")
                changes["modes"] = (_MODE_NAMES[value],)
            case "use_activation" if isinstance(value, bool):
                unscored = {} if value else {"activation": "identity"}
                changes |= {"normalize": value} if config.is_embedder else unscored
            case "task" if value in config.tasks:
                changes["tasks"] = (value,)
            case "enable_chunked_processing" if isinstance(value, bool) and "embed" in config.tasks:
                changes[name] = value
            case "max_embed_len" if isinstance(value, int) and value > 0:
                changes[name] = value
            case "template" if value is False:
                changes["pair_template"] = ""
            case "dimensions" if isinstance(value, int) and value > 0:
                changes["dimensions"] = (value,)
            case _ if value is not None:
                raise ConfigError(
                    f"pooler_config: {name}={value!r} is not supported; known are pooling_type, "
                    f"use_activation (true or false), task ({', '.join(config.tasks)}), dimensions, "
                    "enable_chunked_processing and max_embed_len (of embedders), template (false)."
                )
    return replace(config, **changes)
