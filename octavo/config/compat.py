"""Options of vLLM's that octavo has not: what becomes of each. One row per name; called by EngineArgs.

A value that asks for nothing passes in silence. Any other is dropped with one line of the log that says why
nothing is lost, or refused with what would work. A few are other spellings of options that octavo has.
"""

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger

logger = get_logger(__name__)

_ONE = (1,)
_OFF: tuple[Any, ...] = (False, 0, "", {}, [])
_AUTO = ("auto", "")


class Foreign(NamedTuple):
    """How one option is taken."""

    neutral: tuple[Any, ...]
    """Values that ask for nothing."""
    text: str
    is_refused: bool = True


def _ignored(text: str, *neutral: Any) -> Foreign:
    return Foreign((*_OFF, *neutral), text, is_refused=False)


_LATER = "is not supported yet"
_SPECULATION = f"Speculative decoding {_LATER}."
_MEDIA = "octavo serves text only: no image, video or audio can be in a prompt."
_POOLING = (
    "octavo generates text; embedding, classification and reward models are not supported yet. "
    "Leave it out, or use 'generate'."
)
_ONE_BACKEND = "There is one back end, guidance; options of structured output are given per request."
_WHOLE_LAYERS = (
    "Layers keep all their matrices in host memory, or none: use cpu_offload_gb or offload_group_size."
)
_NO_COMPILER = "octavo compiles no graphs: there is nothing to configure."

FOREIGN: dict[str, Foreign] = {
    "runner": Foreign(("auto", "generate"), _POOLING),
    "convert": Foreign(("auto", "none"), _POOLING),
    "pooler_config": Foreign((), _POOLING),
    "tokenizer_mode": Foreign(
        ("auto", "hf", "slow"), "octavo reads tokenizer.json and GGUF vocabularies; use 'auto'."
    ),
    "tokenizer_revision": _ignored("The tokenizer comes from the model's revision."),
    "hf_token": _ignored("The hub client reads the variable HF_TOKEN; options may end up in logs."),
    "hf_config_path": Foreign(
        _OFF, "The config is that of the model's folder; use hf_overrides to change it."
    ),
    "config_format": Foreign(("auto", "hf"), "Configs are read in Hugging Face's form."),
    "allowed_local_media_path": _ignored(_MEDIA),
    "allowed_media_domains": _ignored(_MEDIA),
    "limit_mm_per_prompt": _ignored(_MEDIA),
    "mm_processor_kwargs": _ignored(_MEDIA),
    "mm_processor_cache_gb": Foreign((*_OFF, 4), _MEDIA, is_refused=False),
    "disable_mm_preprocessor_cache": _ignored(_MEDIA, True),
    "pipeline_parallel_size": Foreign(_ONE, f"Pipeline parallelism {_LATER}: use tensor_parallel_size."),
    "data_parallel_size": Foreign(_ONE, f"Data parallelism {_LATER}: start one engine per replica."),
    "enable_expert_parallel": Foreign(_OFF, f"Expert parallelism {_LATER}."),
    "decode_context_parallel_size": Foreign(_ONE, f"Context parallelism {_LATER}."),
    "nnodes": Foreign(_ONE, f"More than one machine {_LATER}."),
    "disable_custom_all_reduce": _ignored("octavo has no all-reduce of its own.", True),
    "max_parallel_loading_workers": _ignored("Each rank reads its own slice already."),
    "worker_cls": Foreign(("auto",), "Name an Executor class of your own: distributed_executor_backend."),
    "worker_extension_cls": Foreign(
        _OFF, "Name an Executor class of your own: distributed_executor_backend."
    ),
    "scheduler_cls": Foreign(_OFF, "Register a scheduling policy and name it: scheduling_policy."),
    "cpu_offload_params": Foreign(_OFF, _WHOLE_LAYERS),
    "offload_params": Foreign(_OFF, _WHOLE_LAYERS),
    "offload_backend": Foreign(("auto", "prefetch"), "Weights in host memory are always copied ahead."),
    "kv_events_config": Foreign(_OFF, f"A stream of cache events {_LATER}."),
    "kv_offloading_backend": Foreign(("native", ""), "The host tier is octavo's own: leave it out."),
    "calculate_kv_scales": Foreign(_OFF, "Scales of int8 are computed as it is written, that of fp8 is 1."),
    "sliding_window": Foreign((), "The model says its window itself; it cannot be changed."),
    "disable_sliding_window": Foreign(
        _OFF, "The window is part of the model: without it the text is another."
    ),
    "disable_cascade_attn": _ignored("octavo has no cascade attention.", True),
    "attention_config": Foreign(_OFF, "The attention back end is chosen by device and model."),
    "attention_backend": Foreign(_AUTO, "The attention back end is chosen by device and model."),
    "compilation_config": Foreign((*_OFF, 1, 2, 3), _NO_COMPILER, is_refused=False),
    "optimization_level": Foreign((0, 1, 2, 3), _NO_COMPILER, is_refused=False),
    "cuda_graph_sizes": _ignored(_NO_COMPILER),
    "max_seq_len_to_capture": Foreign((8192,), _NO_COMPILER, is_refused=False),
    "performance_mode": Foreign(("balanced",), "octavo has one mode.", is_refused=False),
    "quantization_config": Foreign(_OFF, "The checkpoint says how it is quantized."),
    "structured_outputs_config": Foreign(_OFF, _ONE_BACKEND, is_refused=False),
    "guided_decoding_backend": Foreign((*_AUTO, "guidance"), _ONE_BACKEND, is_refused=False),
    "speculative_config": Foreign(_OFF, _SPECULATION),
    "spec_method": Foreign(_OFF, _SPECULATION),
    "spec_model": Foreign(_OFF, _SPECULATION),
    "spec_tokens": Foreign(_OFF, _SPECULATION),
    "enable_lora": Foreign(_OFF, f"LoRA {_LATER}: merge the adapter into the model's weights."),
    "max_loras": Foreign((*_OFF, 1), "There are no LoRA adapters.", is_refused=False),
    "max_lora_rank": Foreign((*_OFF, 16), "There are no LoRA adapters.", is_refused=False),
    "max_cpu_loras": _ignored("There are no LoRA adapters."),
    "fully_sharded_loras": _ignored("There are no LoRA adapters."),
    "enable_prompt_adapter": Foreign(
        _OFF, "Prompt adapters are not supported: put their text into the prompt."
    ),
    "enable_return_routed_experts": Foreign(_OFF, f"Reporting of routed experts {_LATER}."),
    "return_sampling_mask": Foreign(_OFF, f"Reporting of the sampling mask {_LATER}."),
    "enable_sleep_mode": _ignored("Every engine can sleep.", True),
    "collect_detailed_traces": Foreign(_OFF, "Traces have one span per request: otlp_traces_endpoint."),
    "use_v2_block_manager": _ignored("There is one block manager.", True),
    "enable_kv_cache_compression": _ignored(
        "Name a type of 8 bits for keys and values: kv_cache_dtype, 'fp8' on a GPU, 'int8' on a CPU."
    ),
    "enable_continuous_batching": _ignored("Batching is always continuous.", True),
    "disable_async_output_proc": _ignored("Use steps_in_flight=1 for one step at a time.", True),
    "num_scheduler_steps": Foreign(_ONE, "Use steps_in_flight for steps ahead.", is_refused=False),
    "preemption_mode": Foreign(("recompute", "swap"), "Swapping needs swap_space only.", is_refused=False),
    "num_lookahead_slots": _ignored("Only speculative decoding looks ahead."),
    "max_num_partial_prefills": Foreign(_ONE, "Bound long prompts by long_prefill_token_threshold."),
    "max_long_partial_prefills": Foreign(_ONE, "Bound long prompts by long_prefill_token_threshold."),
}

ALIASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "async_scheduling": ("steps_in_flight", lambda wanted: 2 if wanted else 1),
    "kv_offloading_size": ("swap_space", float),
    "profiler_config": ("profiler_dir", lambda config: str(config["torch_profiler_dir"]) if config else ""),
}
"""vLLM's name → octavo's, and the value in octavo's terms."""


def translate(
    options: Mapping[str, Any],
    known: Container[str],
    aliases: Mapping[str, tuple[str, Callable[[Any], Any]]] = ALIASES,
    foreign: Mapping[str, Foreign] = FOREIGN,
) -> dict[str, Any]:
    """The options in octavo's terms. `known` names win. Raises ConfigError for what is refused."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            translated[name] = value
        elif name in aliases:
            own, convert = aliases[name]
            translated.setdefault(own, _converted(name, value, own, convert))
        elif name not in foreign:
            translated[name] = value
        elif not _is_neutral(value, foreign[name]):
            _take(name, value, foreign[name])
    return translated


def _converted(name: str, value: Any, own: str, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError, LookupError):
        raise ConfigError(f"{name}={value!r} cannot be read as {own}.") from None


def _take(name: str, value: Any, foreign: Foreign) -> None:
    if foreign.is_refused:
        raise ConfigError(f"{name}={value!r}: {foreign.text}")
    logger.warning("%s has no effect. %s", name, foreign.text)


def _is_neutral(value: Any, foreign: Foreign) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in foreign.neutral)
