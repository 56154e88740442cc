"""Names, the import paths that have them, and where each lives. Data only; `octavo.names.modules` reads it.

`PATHS` gives octavo the import paths of vLLM, today's and those of its first versions. A name stands there as
itself, or as `name=entry` where the path means another entry of `HOMES` by it.
"""


def _by_name(homes: dict[str, str]) -> dict[str, str]:
    """Return "module:attribute" by name; a name stands by its module as itself, or as `name=attribute`."""
    words = [(module, word.partition("=")) for module, names in homes.items() for word in names.split()]
    return {name: f"{module}:{attribute or name}" for module, (name, _, attribute) in words}


TOP = _by_name(
    {
        "octavo.llm": "LLM",
        "octavo.frontend.engine": "LLMEngine",
        "octavo.frontend.async_engine": "AsyncLLM AsyncLLMEngine=AsyncLLM",
        "octavo.config.args": "EngineArgs AsyncEngineArgs=EngineArgs",
        "octavo.messages.sampling": "SamplingParams RequestOutputKind RepetitionDetectionParams",
        "octavo.frontend.beam_search.params": "BeamSearchParams BeamSearchOutput BeamSearchSequence",
        "octavo.messages.structured": "StructuredOutputsParams GuidedDecodingParams",
        "octavo.runtime.sampling.processors": "LogitsProcessor=Processor",
        "octavo.runtime.sampling.request_functions": "AdapterLogitsProcessor",
        "octavo.runtime.models.registry": "ModelRegistry",
        "octavo.runtime.weight_transfer.sender": "WeightSender",
        "octavo.frontend.outputs.logprobs": "Logprob FlatLogprobs",
        "octavo.frontend.outputs.request_output": "RequestOutput CompletionOutput",
        "octavo.messages.adapters": "LoRARequest LoRASum PromptAdapterRequest",
        "octavo.messages.pooling": "PoolingParams",
        "octavo.frontend.outputs.pooling_output": """PoolingOutput PoolingRequestOutput EmbeddingOutput
            EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput
            ScoringRequestOutput""",
        "octavo.frontend.requests.prompts": "PromptType TextPrompt EmbedsPrompt TokensPrompt",
        "octavo.frontend.requests.streaming_input": "StreamingInput",
        "octavo.base.errors": """OctavoError ConfigError BadCheckpoint RequestError PromptTooLong
            UnknownModel Overloaded EngineDead Unsupported""",
    }
)
"""The public names, those of `octavo.__all__`."""

HOMES = TOP | _by_name(
    {
        "octavo.runtime.sampling.batch_processor": """BatchUpdate IndexedLogitsProcessor=LogitsProcessor
            MoveDirectionality process_dict_updates""",
        "octavo.runtime.sampling.request_functions": "RequestLogitsProcessor",
        "octavo.metrics": "Metric Counter Gauge Histogram Vector",
        "octavo.frontend.outputs.request_output": "RequestStateStats WeightVersionSpan",
        "octavo.messages.pooling": "LateInteractionParams",
        "octavo.messages.request": "SchedulerStats FinishReason",
        "octavo.config.engine": "EngineConfig",
        "octavo.config.lora": "LoRAConfig",
        "octavo.engine.executor.interface": "Executor",
        "octavo.engine.executor.ray_cluster": "initialize_ray_cluster",
        "octavo.frontend.text.tokenizer": "Tokenizer",
        "octavo.frontend.requests.conversation": "Message",
        "octavo.serving.openai.protocol": "ChatRequest CompletionRequest",
        "octavo.names.settings": """AttentionConfig CompilationConfig CompilationMode CUDAGraphMode
            EPLBConfig KVEventsConfig LoadConfig PoolerConfig ProfilerConfig SpeculativeConfig
            StructuredOutputsConfig UsageContext WeightTransferConfig""",
        "octavo.names.arguments": """FlexibleArgumentParser make_arg_parser validate_parsed_serve_args
            run_server""",
        "octavo.cli.main": "main",
        "octavo.base.log": "init_logger=get_logger",
        "octavo.names.platform": """current_platform Platform=CurrentPlatform
            cleanup_dist_env_and_memory set_random_seed""",
        "octavo.names.helpers": """GiB_bytes=GIB_BYTES cdiv get_distributed_init_method
            get_ip get_open_port get_open_ports_list get_tcp_uri get_tokenizer load_chat_template
            random_uuid""",
        "octavo.names.media": """fetch_image fetch_audio fetch_video encode_image_base64 encode_image_url
            encode_audio_base64 encode_audio_url convert_image_mode ImageAsset AudioAsset""",
        "itertools": "RequestCounter=count",
        "octavo.base.registry": "load_general_plugins=load_plugins",
    }
)
"""By name: "package.module:attribute"."""

_REASONS = {
    "octavo reads media itself: give them as multi_modal_data or as parts of messages.": """
        VideoAsset MultiModalDataDict MULTIMODAL_REGISTRY MultiModalConfig encode_video_base64
        ExplicitEncoderDecoderPrompt zip_enc_dec_prompts""",
    "there are no loggers of one's own yet: read get_metrics() of the engine, or /metrics of the server.": """
        StatLoggerBase LoggingStatLogger PrometheusStatLogger AggregateStatLoggerBase StatLoggerFactory
        RayPrometheusStatLogger IterationStats get_metrics_snapshot""",
    "parsers cannot be added yet: name one that is there, tool_call_parser and reasoning_parser.": """
        ToolParser ToolParserManager ReasoningParser ReasoningParserManager""",
    "octavo starts its ranks itself: tensor_parallel_size, nnodes.": """
        init_distributed_environment initialize_model_parallel
        ensure_model_parallel_initialized""",
}
LATER = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Names whose feature is not there, and why: they load, and say so when they are used."""

_ENGINE_ARGS = "EngineArgs AsyncEngineArgs"
_SAMPLING = """SamplingParams BeamSearchParams StructuredOutputsParams GuidedDecodingParams RequestOutputKind
    RepetitionDetectionParams"""
_PROMPTS = """PromptType TextPrompt TokensPrompt EmbedsPrompt StreamingInput ExplicitEncoderDecoderPrompt
    zip_enc_dec_prompts"""
_METRICS = "Metric Counter Gauge Histogram Vector get_metrics_snapshot"
_PROCESSORS = """LogitsProcessor=IndexedLogitsProcessor AdapterLogitsProcessor RequestLogitsProcessor
    BatchUpdate MoveDirectionality process_dict_updates"""
_NETWORK = "get_ip get_open_port get_open_ports_list get_tcp_uri get_distributed_init_method"
_MEDIA_UTILS = """fetch_image fetch_audio fetch_video encode_image_base64 encode_image_url
    encode_audio_base64 encode_audio_url encode_video_base64"""
_SERVER = "run_server make_arg_parser validate_parsed_serve_args FlexibleArgumentParser"

PATHS = {
    "": f"initialize_ray_cluster {' '.join(TOP)}",
    "assets": "",
    "assets.audio": "AudioAsset",
    "assets.image": "ImageAsset",
    "assets.video": "VideoAsset",
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "config": """VllmConfig=EngineConfig LoRAConfig PoolerConfig CompilationConfig CompilationMode
        CompilationLevel=CompilationMode CUDAGraphMode SpeculativeConfig StructuredOutputsConfig
        DecodingConfig=StructuredOutputsConfig AttentionConfig ProfilerConfig KVEventsConfig LoadConfig
        MultiModalConfig EPLBConfig WeightTransferConfig""",
    "config.compilation": "CompilationConfig CompilationMode CUDAGraphMode",
    "config.pooler": "PoolerConfig",
    "distributed": """cleanup_dist_env_and_memory init_distributed_environment initialize_model_parallel
        ensure_model_parallel_initialized""",
    "distributed.parallel_state": """cleanup_dist_env_and_memory init_distributed_environment
        initialize_model_parallel ensure_model_parallel_initialized""",
    "engine": "LLMEngine AsyncLLMEngine " + _ENGINE_ARGS,
    "engine.arg_utils": _ENGINE_ARGS,
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "engine.protocol": "EngineClient=AsyncLLM",
    "entrypoints.api_server": _SERVER,
    "entrypoints.chat_utils": "load_chat_template ChatCompletionMessageParam=Message",
    "entrypoints.cli.main": "main",
    "entrypoints.llm": "LLM",
    "entrypoints.openai.api_server": _SERVER,
    "entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest=ChatRequest",
    "entrypoints.openai.cli_args": _SERVER,
    "entrypoints.openai.completion.protocol": "CompletionRequest",
    "entrypoints.openai.protocol": "ChatCompletionRequest=ChatRequest CompletionRequest",
    "entrypoints.openai.run_batch": "",
    "entrypoints.openai.tool_parsers": "ToolParser ToolParserManager",
    "exceptions": "VLLMValidationError=RequestError",
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "logger": "init_logger",
    "logits_process": "LogitsProcessor=RequestLogitsProcessor",
    "logits_processor": _PROCESSORS,
    "logprobs": "Logprob FlatLogprobs",
    "lora.request": "LoRARequest",
    "model_executor.models": "ModelRegistry",
    "model_executor.models.registry": "ModelRegistry",
    "model_executor.utils": "set_random_seed",
    "multimodal": "MultiModalDataDict MULTIMODAL_REGISTRY",
    "multimodal.image": "convert_image_mode",
    "multimodal.utils": _MEDIA_UTILS,
    "outputs": """RequestOutput CompletionOutput WeightVersionSpan PoolingOutput PoolingRequestOutput
        EmbeddingOutput EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput
        ScoringRequestOutput""",
    "platforms": "current_platform Platform",
    "plugins": "load_general_plugins",
    "pooling_params": "PoolingParams LateInteractionParams",
    "prompt_adapter.request": "PromptAdapterRequest",
    "reasoning": "ReasoningParser ReasoningParserManager",
    "sampling_params": _SAMPLING,
    "sequence": "Logprob RequestMetrics=RequestStateStats",
    "tokenizers": "get_tokenizer TokenizerLike=Tokenizer",
    "tool_parsers": "ToolParser ToolParserManager",
    "transformers_utils.tokenizer": "get_tokenizer AnyTokenizer=Tokenizer TokenizerLike=Tokenizer",
    "usage": "UsageContext",
    "usage.usage_lib": "UsageContext",
    "utils": "random_uuid cdiv GiB_bytes Counter=RequestCounter FlexibleArgumentParser " + _NETWORK,
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.counter": "Counter=RequestCounter",
    "utils.math_utils": "cdiv",
    "utils.mem_constants": "GiB_bytes",
    "utils.network_utils": _NETWORK,
    "utils.torch_utils": "set_random_seed",
    "v1.engine": "FinishReason",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.exceptions": "EngineDeadError=EngineDead EngineGenerateError=OctavoError",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.executor": "Executor",
    "v1.executor.abstract": "Executor",
    "v1.metrics.loggers": """StatLoggerBase LoggingStatLogger PrometheusStatLogger AggregateStatLoggerBase
        StatLoggerFactory""",
    "v1.metrics.ray_wrappers": "RayPrometheusStatLogger",
    "v1.metrics.reader": _METRICS,
    "v1.metrics.stats": "SchedulerStats IterationStats RequestStateStats",
    "v1.sample.logits_processor": _PROCESSORS,
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.sample.logits_processor.interface": _PROCESSORS,
}
"""By import path below `octavo`: its names."""

MODULES = {"envs": "octavo.names.environment"}
"""Import paths that are another module."""

PROGRAMS = {
    "entrypoints.api_server": "serve",
    "entrypoints.openai.api_server": "serve",
    "entrypoints.openai.run_batch": "run-batch",
}
"""Import paths that can be run (`python -m`): octavo's command of the same use."""
