"""What other engines have and octavo has not, by name, and what becomes of each: one table for every front.

Options of the engine and of the server, fields of requests, keywords of SamplingParams, routes. A value that
asks for nothing passes in silence. Any other is dropped, with a text that says why nothing is lost; or it is
refused, with what would work. Each front raises the error that its callers expect.
"""

from typing import Any, NamedTuple

_ONE = (1,)
_OFF: tuple[Any, ...] = (False, 0, "", {}, [])
_AUTO = ("auto", "")


class Foreign(NamedTuple):
    """How one name is taken."""

    neutral: tuple[Any, ...]
    """Values that ask for nothing."""
    text: str
    is_refused: bool = True

    def asks(self, value: Any) -> bool:
        """Whether the value asks for something."""
        return not any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


def _ignored(text: str, *neutral: Any) -> Foreign:
    return Foreign((*_OFF, *neutral), text, is_refused=False)


def _refused(text: str, *neutral: Any) -> Foreign:
    return Foreign((None, *_OFF, -1, *neutral), text)


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
_LOGS = "OCTAVO_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH say what is logged; bodies never are."
TOP_EMA = "no paper and no engine says what Top-EMA sampling is. Use top_p, min_p or top_k instead."
_TEXT_ONLY = "octavo serves text only"
_NO_POOLING = "the model generates text; embeddings, classes and scores need another kind of model"
_NO_LORA = "adapters are not loaded at run time: merge the adapter into the model's weights"

ENGINE: dict[str, Foreign] = {
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
"""Options of the engine."""

SERVER: dict[str, Foreign] = {
    "middleware": Foreign(_OFF, "No code is loaded by name into the server: put a proxy in front of it."),
    "headless": Foreign(_OFF, f"More than one machine {_LATER}."),
    "grpc": Foreign(_OFF, "octavo speaks HTTP, server-sent events and WebSocket."),
    "enable_ssl_refresh": Foreign(_OFF, "Certificates are read once: restart the server to renew them."),
    "trust_request_chat_template": Foreign(_OFF, "A template never comes from a request: --chat-template."),
    "lora_modules": Foreign(_OFF, f"LoRA {_LATER}: merge the adapter into the model's weights."),
    "enable_auto_tool_choice": _ignored("The format of tool calls says it: --tool-call-parser.", True),
    "tool_parser_plugin": Foreign(_OFF, "No code is loaded by name into the server."),
    "tool_server": Foreign(_OFF, f"A server of tools {_LATER}."),
    "exclude_tools_when_tool_choice_none": _ignored("Tools are not shown to the model yet.", True),
    "enable_tokenizer_info_endpoint": Foreign(_OFF, f"/tokenizer_info {_LATER}."),
    "enable_server_load_tracking": _ignored("/load always tells.", True),
    "enable_log_outputs": _ignored(_LOGS),
    "enable_log_deltas": _ignored(_LOGS, True),
    "log_error_stack": _ignored(_LOGS, True),
    "log_config_file": _ignored(_LOGS),
    "max_log_len": _ignored(_LOGS),
    "uvicorn_log_level": _ignored(_LOGS, "info", "debug", "warning", "error", "critical", "trace"),
    "disable_access_log_for_endpoints": _ignored("Probes are not logged."),
    "h11_max_header_count": _ignored("A request may have 100 header lines.", 256),
    "enable_offline_docs": _ignored("/docs always works offline."),
}
"""Options of the server."""

FIELDS: dict[str, Foreign] = {
    "user": _ignored("whose request it is; keys tell tenants apart"),
    "safety_identifier": _ignored("as user"),
    "metadata": _ignored("notes for OpenAI's dashboard"),
    "store": _ignored("answers of chat are not kept"),
    "service_tier": _ignored("there is one"),
    "prediction": _ignored("a hint for speed"),
    "prompt_cache_key": _ignored("prefixes are found by content; cache_salt keeps them apart"),
    "prompt_cache_retention": _ignored("blocks are kept while there is room"),
    "session_id": _ignored("there is one replica"),
    "add_response_role": _ignored("the role is always sent"),
    "verbosity": _ignored("a hint to OpenAI's own models"),
    "functions": _refused("use tools"),
    "function_call": _refused("use tools and tool_choice"),
    "modalities": _refused(_TEXT_ONLY, ["text"]),
    "audio": _refused(_TEXT_ONLY),
    "mm_processor_kwargs": _refused(_TEXT_ONLY),
    "media_io_kwargs": _refused(_TEXT_ONLY),
    "web_search_options": _refused("octavo reaches no network"),
    "chat_template": _refused(
        "a template never comes from a request; the operator sets one with --chat-template"
    ),
    "kv_transfer_params": _refused("there is no KV connector"),
    "ec_transfer_params": _refused("there is no encoder cache connector"),
    "watermarking": _refused("there are no watermarks"),
    "return_token_offsets": _refused("offsets are not known; logprobs have text_offset"),
    "suffix": _refused("the model is not told what follows; put it into the prompt in the model's own form"),
}
"""Fields of requests over HTTP."""

SAMPLING = {
    "top_ema_p": Foreign((None, 0, 0.0), TOP_EMA),
    "top_ema_d": Foreign((None, 0, 0.0), TOP_EMA),
    "multiple_stop_sequences": Foreign(
        (None, False, True), "give True or False; `stop` takes several in any case."
    ),
    "watermarking": Foreign((None,), "watermarks are not there yet; logits_processors can add one."),
    "trace_decode_token_ids": Foreign((None,), "octavo keeps no trace of decoding: leave it None."),
    "routed_experts_prompt_start": Foreign((None, 0), "octavo does not return routed experts: leave it 0."),
    "skip_clone": Foreign((None, False, True), "give True or False; parameters are copied in any case."),
}
"""Keywords of SamplingParams."""

ROUTES = {
    "/v1/embeddings": _NO_POOLING,
    "/v2/embed": _NO_POOLING,
    "/pooling": _NO_POOLING,
    "/classify": _NO_POOLING,
    "/score": _NO_POOLING,
    "/v1/score": _NO_POOLING,
    "/rerank": _NO_POOLING,
    "/v1/rerank": _NO_POOLING,
    "/v2/rerank": _NO_POOLING,
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
    "/v1/audio/speech": _TEXT_ONLY,
    "/v1/audio/transcriptions": _TEXT_ONLY,
    "/v1/audio/translations": _TEXT_ONLY,
    "/v1/images/generations": _TEXT_ONLY,
}
"""Paths of the HTTP server."""
