"""Options that other engines have and octavo has not: one table for Python, YAML and the command line.

Each text says why nothing is lost, or what would work, and behind it stand the options it is about: a switch
of the command line with `?`, a list with `*`, values that ask for nothing behind `=`. `compat` applies it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.base.foreign import OFF, Foreign


class Alias(NamedTuple):
    """octavo's name of an option, and what makes octavo's value of another engine's."""

    own: str
    convert: Callable[[Any], Any]
    is_switch: bool = False
    is_list: bool = False


ALIASES = {
    "async_scheduling": Alias("steps_in_flight", lambda wanted: 2 if wanted else 1, is_switch=True),
    "attention_config": Alias(
        "attention_backend", lambda config: str(config["backend"] or "auto") if config else "auto"
    ),
    "dcp_kv_cache_interleave_size": Alias("cp_kv_cache_interleave_size", int),
    "kv_offloading_size": Alias("swap_space", float),
    "max_num_scheduled_tokens": Alias("max_num_batched_tokens", int),
    "profiler_config": Alias(
        "profiler_dir", lambda config: str(config["torch_profiler_dir"]) if config else ""
    ),
    "target_modules": Alias("lora_target_modules", list, is_list=True),
    "tokens_only": Alias("skip_tokenizer_init", bool, is_switch=True),
}
"""Other names of the engine's options."""

SERVER_ALIASES = {
    "disable_uvicorn_access_log": Alias("disable_access_log", bool, is_switch=True),
    "disable_fastapi_docs": Alias("disable_page", bool, is_switch=True),
    "h11_max_incomplete_event_size": Alias("max_header_bytes", int),
}
"""Other names of the server's options."""

_MEDIA = "Images are read and encoded in one way: MediaConfig has the options."
_REPLICAS = "All replicas are on this machine, or each is started alone: data_parallel_size and _rank."
_ONE_ENGINE = "There is one engine: start one per replica."
_EXPERTS = "Ranks have all tokens and equal numbers of experts: see enable_expert_parallel and enable_eplb."
_CONTEXT = "Prompts are divided over ranks by heads, the cache by tokens: decode_context_parallel_size."
_NO_CODE = "No code is loaded by name into the server."
_LOGS = "OCTAVO_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH say what is logged; bodies never are."

_ENGINE_REFUSED = {
    "octavo reads tokenizer.json and GGUF vocabularies; use 'auto'.": "tokenizer_mode=hf|slow",
    "The config is that of the model's folder; use hf_overrides to change it.": "hf_config_path",
    "Configs are read in Hugging Face's form.": "config_format=hf",
    "Register a class for the architecture: ModelRegistry.": "model_class_overrides",
    "Name the folder or file that holds the weights: model.": "model_weights",
    "The model says its window itself; it cannot be changed.": "sliding_window",
    "The window is part of the model: without it the text is another.": "disable_sliding_window?",
    "Diffusion of text is not supported yet.": "diffusion_config",
    "Use load_format and safetensors_load_strategy.": "model_loader_extra_config",
    _MEDIA: "mm_encoder_only? ec_transfer_config",
    _NO_CODE: "io_processor_plugin",
    _REPLICAS: "data_parallel_multi_port_external_lb?",
    _CONTEXT: "prefill_context_parallel_size=1",
    "Choose GPUs by the variable CUDA_VISIBLE_DEVICES.": "device_ids*",
    "Name an Executor class of your own: distributed_executor_backend.": "worker_cls worker_extension_cls",
    "Register a scheduling policy and name it: scheduling_policy.": "scheduler_cls",
    "Use max_num_seqs.": "max_num_active_seqs",
    "Bound long prompts by long_prefill_token_threshold.": (
        "max_num_partial_prefills=1 max_long_partial_prefills=1 long_prefill_token_threshold_adaptive?"
    ),
    "All layers keep keys and values in one type.": "kv_cache_dtype_skip_layers*",
    "Scales are computed as int8 is written, and fp8's measured at the start.": "calculate_kv_scales?",
    "A stream of cache events is not supported yet.": "kv_events_config",
    "The host tier is octavo's own: leave it out.": "kv_offloading_backend=native",
    "Layers keep all their matrices in host memory, or none: use cpu_offload_gb or offload_group_size.": (
        "cpu_offload_params offload_params"
    ),
    "Weights in host memory are always copied ahead.": "offload_backend=prefetch",
    "Parsers cannot be added yet: name one that is there, reasoning_parser.": "reasoning_parser_plugin",
    "There are no watermarks: a class in logits_processors can add one.": "watermark_config",
    "Reporting of the sampling mask is not supported yet.": "return_sampling_mask?",
    "Output beside the text is not supported yet.": "aux_output_config",
    "octavo keeps no trace of decoding.": "enable_trace_replay?",
    "Traces have one span per request: otlp_traces_endpoint.": "collect_detailed_traces*",
}

_ENGINE_WITHOUT_EFFECT = {
    "The tokenizer comes from the model's revision.": "tokenizer_revision",
    "The hub client reads the variable HF_TOKEN; options may end up in logs.": "hf_token",
    "Code from a model's folder never runs.": "code_revision",
    "No scheme that octavo reads is deprecated.": "allow_deprecated_quantization?",
    "States of recurrent layers are float32, and kept every mamba_block_size tokens.": """
        engram_config mamba_config mamba_cache_dtype mamba_ssm_cache_dtype
        mamba_cache_mode mamba_backend mamba_ssu_algorithm mamba_cache_philox_rounds replayssm_buffer_len
        use_replayssm? enable_mamba_shared_prefix_checkpoint? enable_mamba_cache_stochastic_rounding?""",
    "Each rank reads its own slice already.": "max_parallel_loading_workers",
    "safetensors_load_strategy says how files are read.": (
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size"
    ),
    "Safetensors, tokenizer and config files of a repository's top folder are fetched.": "ignore_patterns*",
    "Loading shows a bar on a terminal.": "use_tqdm_on_load?=true",
    "Pickled weights are never loaded.": "pt_load_map_location=cpu",
    _MEDIA: """
        language_model_only?=true disable_mm_preprocessor_cache?=true skip_mm_profiling?=true
        interleave_mm_strings?=true disable_chunked_mm_input?=true mm_device_do_normalize?=true
        enable_mm_processor_stats?=true mm_processor_cache_type mm_hasher_algorithm
        mm_shm_cache_max_object_size_mb mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        ec_manager_config""",
    _ONE_ENGINE: """
        data_parallel_external_lb? data_parallel_address
        data_parallel_backend
        dp_sync_interval disable_nccl_for_dp_synchronization? aggregate_engine_logging?""",
    _EXPERTS: """
        enable_ep_weight_filter? expert_placement_strategy all2all_backend
        elastic_ep_max_dp_size""",
    "Queries are gathered, and what ranks have seen goes to the rank of its heads, all to all.": (
        "dcp_comm_backend dcp_q_replicate?"
    ),
    "stall_timeout says when an engine that hangs is given up.": (
        "cpu_distributed_timeout_seconds watchdog_config"
    ),
    "on_crash says what a server does.": "fault_tolerance_config enable_fault_tolerance?",
    "Processes are bound from outside: start octavo under numactl or taskset.": (
        "numa_bind? numa_bind_nodes* numa_bind_cpus*"
    ),
    "octavo does not use Ray.": "ray_workers_use_nsight?",
    "Batching is always continuous.": "enable_continuous_batching?=true",
    "Use steps_in_flight=1 for one step at a time.": "disable_async_output_proc?=true",
    "Use steps_in_flight for steps ahead.": "num_scheduler_steps=1",
    "Swapping needs swap_space only.": "preemption_mode=recompute|swap",
    "Slots are reserved with the step that needs them.": "num_lookahead_slots",
    "Outputs tell of their drafts; answers over HTTP do under enable_per_request_metrics.": (
        "per_request_spec_decode_metrics=none"
    ),
    "Prompts and new tokens share every step; blocks are taken as they are needed.": (
        "scheduler_reserve_full_isl?=true prefill_schedule_interval=1 watermark"
    ),
    "There is one block manager.": "use_v2_block_manager?=true disable_hybrid_kv_cache_manager?=true",
    "Blocks are kept while there is room for them.": "prefix_cache_retention_interval prefix_match_unit",
    "Name a type of 8 bits for keys and values: kv_cache_dtype, 'fp8' on a GPU, 'int8' on a CPU.": (
        "enable_kv_cache_compression?"
    ),
    "It adjusts a mechanism of vLLM's that octavo does not have.": """
        kv_sharing_fast_prefill?=true swa_bounded_replay?=true _api_process_count _api_process_rank
        additional_config dbo_decode_token_threshold dbo_prefill_token_threshold
        enable_batch_sharded_sampling? enable_cumem_allocator? enable_dbo? enable_hc_sp?
        enable_nccl_comm_suspend? enable_shm_tensor_arena? fail_on_environ_validation?
        renderer_num_workers ubatch_size use_fp64_gumbel?""",
    "octavo has no cascade attention.": "disable_cascade_attn?=true",
    "octavo compiles no graphs: there is nothing to configure.": (
        "compilation_config=1|2|3 optimization_level=1|2|3"
    ),
    "octavo chooses itself for which sizes it captures CUDA graphs; enforce_eager=True captures none.": (
        "cuda_graph_sizes* cudagraph_capture_sizes* max_cudagraph_capture_size max_seq_len_to_capture=8192"
    ),
    "octavo has one mode.": "performance_mode=balanced",
    "Kernels are chosen by device and model.": """
        kernel_config ir_op_priority moe_backend linear_backend sparse_indexer_topk_backend
        monokernel?=true enable_flashinfer_autotune?=true gdn_prefill_backend kda_prefill_backend
        kda_decode_backend""",
    "There is one back end, guidance; options of structured output are given per request.": (
        "structured_outputs_config guided_decoding_backend=guidance"
    ),
    "The model's reasoning_parser says how it marks its reasoning.": "reasoning_config",
    "Adapters are cut over the ranks as their matrices are; experts and encoders take PEFT's.": """
        fully_sharded_loras? max_lora_cls_labels enable_tower_connector_lora?
        specialize_active_lora? enable_mixed_moe_lora_format? enable_moe_shared_loras?""",
    "Every engine can sleep.": """
        enable_sleep_mode?=true sleep_mode_offload_cudagraph?=true sleep_mode_backend=cumem
        sleep_preserve_parameter_names*""",
    "All metrics are always there: docs/metrics.md.": """
        show_hidden_metrics_for_version kv_cache_metrics? kv_cache_metrics_sample custom_histogram_buckets
        cudagraph_metrics? enable_mfu_metrics? enable_logging_iteration_details?""",
    "Use profiler_dir, start_profile and stop_profile.": (
        "enable_layerwise_nvtx_tracing? jit_monitor_verbose? jit_monitor_mode"
    ),
    _LOGS: "logging_config log_level log_config_file",
}

_SERVER_REFUSED = {
    "No code is loaded by name into the server: put a proxy in front of it.": "middleware*",
    _NO_CODE: "tool_parser_plugin",
    "octavo speaks HTTP, server-sent events and WebSocket.": "grpc? grpc_port",
    "Certificates are read once: restart the server to renew them.": "enable_ssl_refresh?",
    "A template never comes from a request: --chat-template.": "trust_request_chat_template?",
    "A server of tools is not supported yet.": "tool_server",
    "Set the chat template's variables: --default-chat-template-kwargs.": "reasoning_effort_map",
    _REPLICAS: "enable_scale_out?",
}

_SERVER_WITHOUT_EFFECT = {
    "The format of tool calls says it: --tool-call-parser.": "enable_auto_tool_choice?=true",
    "Tools are not shown to the model yet.": "exclude_tools_when_tool_choice_none?=true",
    "/load always tells.": "enable_server_load_tracking?=true",
    "/tokenizer_info always tells.": "enable_tokenizer_info_endpoint?=true",
    _LOGS: """
        enable_log_deltas?=true log_error_stack?=true enable_log_outputs? max_log_len
        uvicorn_log_level=info|debug|warning|error|critical|trace""",
    "Probes are not logged.": "disable_access_log_for_endpoints",
    "A request may have 100 header lines.": "h11_max_header_count=256",
    "/docs always works offline.": "enable_offline_docs?",
    _MEDIA: "trust_request_mm_kwargs?",
    "The field thinking says it, per request.": "anthropic_disabled_thinking_effort",
    "octavo has no routes in Cohere's form.": "cohere_is_reasoning_model? cohere_format",
    "system_fingerprint names octavo's version.": "fingerprint_mode=full fingerprint_value",
    _ONE_ENGINE: """
        data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
        dp_supervisor_probe_failure_threshold""",
    "Scores of token vectors are computed by the server.": "enable_flash_late_interaction?=true",
}


def _rows(texts: Mapping[str, str], *, is_refused: bool) -> dict[str, Foreign]:
    return {
        name.rstrip("?*"): Foreign(
            (*OFF, "auto", *_values(neutral)), text, is_refused, name.endswith("?"), name.endswith("*")
        )
        for text, words in texts.items()
        for name, _, neutral in (word.partition("=") for word in words.split())
    }


def _values(neutral: str) -> list[Any]:
    return [
        int(word) if word.isdigit() else word == "true" or word for word in filter(None, neutral.split("|"))
    ]


ENGINE = _rows(_ENGINE_REFUSED, is_refused=True) | _rows(_ENGINE_WITHOUT_EFFECT, is_refused=False)
"""Options of the engine."""

SERVER = _rows(_SERVER_REFUSED, is_refused=True) | _rows(_SERVER_WITHOUT_EFFECT, is_refused=False)
"""Options of the server."""
