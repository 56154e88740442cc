"""What is loaded, and how its weights and tokens are read."""

from dataclasses import dataclass
from typing import Any

from octavo.base.hub import locate
from octavo.config.checkpoint import read_checkpoint
from octavo.config.option import Concern, option

DEFAULT_MODEL = "smollm2"
FIT = -1
"""A max_model_len: as long as memory holds."""
NO_GENERATION_CONFIG = ("octavo", "vllm")
"""Words for a generation_config: sampling defaults are the engine's."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(metaclass=Concern):
    """The model, its tokenizer and its limits."""

    model: str = option(DEFAULT_MODEL, "Folder, GGUF file or hub name; 'smollm2' is the built-in default.")
    runner: str = option(
        "auto",
        "Generate text, or pooling: embeddings, scores, labels; auto = as the model's files say.",
        ("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "What runner='pooling' makes of a model that generates: embed or classify; auto = embed.",
        ("auto", "none", "embed", "classify"),
    )
    pooler_config: dict[str, Any] = option(
        {}, "Entries that replace the model's: pooling_type (MEAN, CLS, LAST …), use_activation, dimensions."
    )
    tokenizer: str = option("", "Folder, GGUF file or hub name of the tokenizer; empty = the model's own.")
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts are token ids, outputs have no text."
    )
    trust_remote_code: bool = option(
        False, "Accepted for compatibility; code from a model folder never runs."
    )
    revision: str = option("", "Branch, tag or commit on the hub.")
    download_dir: str = option("", "Where hub downloads are kept; empty = the hub client's own folder.")
    weight_transfer_config: dict[str, Any] = option(
        {},
        "How a trainer sends weights to the running engine: backend (nccl, ipc), and keep_in, a folder from "
        "which they return after a crash.",
    )
    dtype: str = option(
        "auto",
        "Type in which weights and KV cache are kept; on CPU arithmetic is float32 in any case.",
        ("auto", "float32", "bfloat16", "float16", "float", "half"),
    )
    activations: str = option(
        "auto",
        "Precision of the inputs of products with packed and bfloat16 weights on CPU: float32 (exact), "
        "int16 (packed weights only; nearly exact), bfloat16 (needs AMX, AVX512_BF16 or ARM's BF16, else "
        "float32) or int8 (rounded most); auto = bfloat16 where the CPU has AMX, else int16, and with the "
        "other two bfloat16 for bfloat16 weights (Intel's without AMX: float32); with AMX, float32 weights "
        "of pooling models are multiplied as sums of two bfloat16 numbers (16 bits). On a GPU auto rounds "
        "inputs to 8 bits where a checkpoint was made for that (FP8, W8A8); float32 never does.",
        ("auto", "float32", "bfloat16", "int16", "int8"),
    )
    attention_backend: str = option(
        "auto",
        "What computes attention: paged (octavo's kernels), cudnn, flash_attn or flashinfer (installed "
        "packages); auto = cudnn where it is installed, else paged, and a package for what it is faster at "
        "by a measurement at start. vLLM's names mean the same.",
        ("auto", "paged", "cudnn", "flash_attn", "flashinfer", "TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"),
    )
    quantization: str = option(
        "",
        "Quantization scheme; empty = what the checkpoint says (gptq, awq, auto-round, compressed-tensors, "
        "fp8, bitsandbytes, quark, gguf). int8 packs an unquantized checkpoint as it is loaded, to 8 bits "
        "and a scale per 32 weights; int4, int4_32 and int4_64 (groups of 128, 32, 64), fp8_per_tensor, "
        "fp8_per_channel, fp8_per_block, mxfp8 and GGUF's q4_k, q5_k, q6_k, q8_0 and q4_0 all but embeddings "
        "and head; online = as quantization_config says.",
    )
    quantization_config: dict[str, Any] = option(
        {},
        "Rounding of a plain checkpoint by kind of layer: linear and moe name one each, or targets by module "
        "(or re:PATTERN); what ignore lists stays plain.",
    )
    load_format: str = option("auto", "How weights are read.", ("auto", "hf", "safetensors", "gguf", "dummy"))
    safetensors_load_strategy: str = option(
        "lazy",
        "How safetensors files are read: page by page as needed, or whole and ahead (for slow disks).",
        ("lazy", "prefetch"),
        words={"auto": "lazy", "eager": "prefetch"},
    )
    model_impl: str = option(
        "auto",
        "Whose code runs the model: octavo's own, or transformers'; auto = octavo's where there is any.",
        ("auto", "octavo", "transformers"),
    )
    max_model_len: int = option(
        0,
        "Longest prompt + output in tokens; 0 = the model's; -1 or auto = the model's, or less where the "
        "cache has no room for it.",
        words={"auto": FIT},
    )
    seed: int = option(0, "Seed of dummy weights, and of requests that bring none when it is not 0.")
    hf_overrides: dict[str, Any] = option({}, "Entries that replace those of config.json.")
    generation_config: str = option(
        "auto",
        "Sampling defaults: 'auto' = the model's, 'octavo' = ours; or a folder with generation_config.json.",
    )
    override_generation_config: dict[str, Any] = option({}, "Sampling defaults that replace the model's.")
    max_logprobs: int = option(
        20, "Maximum number of logprobs that a request may ask for per position; -1 = the vocabulary."
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "Logprobs before (raw) or after (processed) penalties, temperature and truncation.",
        ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    chat_template: str = option("", "File with a Jinja chat template; empty = the model's own.")
    enable_return_routed_experts: bool = option(
        False, "Tell which experts took each token: routed_experts of finished outputs."
    )
    enable_prompt_embeds: bool = option(False, "Take prompts that are given as embeddings (prompt_embeds).")
    logits_processors: list[str] = option(
        [], "Classes derived from octavo.LogitsProcessor, by name: package.module:Class."
    )

    def get_vocab_size(self) -> int:
        """Return the number of token ids that the model knows. Raises ConfigError if the model is gone."""
        path = locate(self.model, revision=self.revision, download_dir=self.download_dir)
        return read_checkpoint(path, self.hf_overrides).vocab_size
