"""docs/compatibility.md tells the truth: rows are complete, what works is tested, refusals say their text."""

import ast
import asyncio
import dataclasses
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import pytest

import octavo
from octavo import LLM, AsyncLLM, EngineArgs, OctavoError, SamplingParams
from octavo.base import env
from octavo.cli.main import COMMANDS
from octavo.config.compat import translate
from octavo.config.foreign import ALIASES, ENGINE, SERVER, SERVER_ALIASES
from octavo.config.server import ServerConfig
from octavo.frontend.requests.options import KEYWORDS, RequestOptions
from octavo.frontend.requests.prompts import parse_prompt
from octavo.messages.request import FinishReason
from octavo.names.modules import entries
from octavo.names.table import HOMES, MODULES, PROGRAMS
from octavo.serving.openai.answers import FinishReason as ToldFinishReason

ROOT = Path(__file__).resolve().parents[2]
STATUSES = ("works", "superset", "refused", "not applicable", "not yet")
SHOWN = ("works", "superset")
ID_RANGES = ((1, 49), (50, 74), (80, 104), (110, 136), (140, 155), (160, 185), (190, 199), (210, 222))
OPTIONS = set(EngineArgs.__dataclass_fields__) | set(ALIASES)
FLAGS = OPTIONS | set(ServerConfig.__dataclass_fields__)

NAMES = {
    "Names at the top": """LLM, LLMEngine, AsyncLLMEngine, EngineArgs, AsyncEngineArgs, SamplingParams,
        PoolingParams, ModelRegistry, PromptType, TextPrompt, TokensPrompt, RequestOutput, CompletionOutput,
        PoolingOutput, PoolingRequestOutput, EmbeddingOutput, EmbeddingRequestOutput, ClassificationOutput,
        ClassificationRequestOutput, ScoringOutput, ScoringRequestOutput, initialize_ray_cluster, __version__,
        StructuredOutputsParams, RequestOutputKind, BeamSearchParams, RepetitionDetectionParams, LoRARequest,
        AsyncLLM""",
    "Modules": """config, sampling_params, inputs, outputs, lora.request, v1.engine.async_llm,
        v1.sample.logits_processor, v1.metrics.reader, v1.metrics.loggers, engine.arg_utils,
        engine.llm_engine, engine.async_llm_engine, entrypoints.llm, entrypoints.chat_utils,
        entrypoints.openai.api_server, utils, utils.argparse_utils, utils.network_utils, logger, platforms,
        distributed, envs, tokenizers, usage.usage_lib, multimodal.utils, assets.image, pooling_params""",
    "Keywords of `LLM`": """model, runner, convert, tokenizer, tokenizer_mode, skip_tokenizer_init,
        trust_remote_code, allowed_local_media_path, allowed_media_domains, tensor_parallel_size, dtype,
        quantization, revision, tokenizer_revision, chat_template, seed, gpu_memory_utilization,
        cpu_offload_gb, offload_group_size, offload_num_in_group, offload_prefetch_step, offload_params,
        enforce_eager, enable_return_routed_experts, return_sampling_mask, disable_custom_all_reduce,
        hf_token, hf_overrides, mm_processor_kwargs, pooler_config, structured_outputs_config,
        profiler_config, attention_config, kv_cache_memory_bytes, compilation_config, quantization_config,
        logits_processors, spec_method, spec_model, spec_tokens""",
    "Methods of `LLM`": """from_engine_args, generate, chat, enqueue, enqueue_chat, wait_for_completion,
        encode, embed, classify, score, beam_search, get_tokenizer, get_default_sampling_params, get_metrics,
        get_world_size, collective_rpc, apply_model, sleep, wake_up, release_kv_cache_memory,
        reset_prefix_cache, reset_mm_cache, start_profile, stop_profile, init_weight_transfer_engine,
        start_weight_update, update_weights, finish_weight_update, update_weight_version,
        get_weight_version""",
    "Forms of a prompt": """str, list[int], prompt, prompt_token_ids, prompt_embeds, cache_salt,
        multi_modal_data, multi_modal_uuids, mm_processor_kwargs, encoder_prompt""",
    "Fields of `SamplingParams`": """n, presence_penalty, frequency_penalty, repetition_penalty, temperature,
        top_p, top_k, min_p, seed, stop, stop_token_ids, bad_words, ignore_eos, max_tokens, min_tokens,
        logprobs, prompt_logprobs, logprob_token_ids, prompt_logprob_token_ids, prompt_logprob_start,
        flat_logprobs, detokenize, skip_special_tokens, spaces_between_special_tokens,
        include_stop_str_in_output, output_kind, stream_interval, structured_outputs, logit_bias,
        allowed_token_ids, extra_args, skip_reading_prefix_cache, thinking_token_budget,
        repetition_detection, watermarking, routed_experts_prompt_start, trace_decode_token_ids,
        skip_clone""",
    "Fields of `BeamSearchParams`": """beam_width, max_tokens, ignore_eos, temperature, length_penalty,
        include_stop_str_in_output, structured_outputs, skip_special_tokens, watermarking""",
    "Fields of `PoolingParams`": """use_activation, dimensions, step_tag_id, returned_token_ids,
        task, late_interaction_params""",
    "Fields of `LoRARequest`": """lora_name, lora_int_id, lora_path, base_model_name, load_inplace,
        is_3d_lora_weight""",
    "Fields of `RequestOutput`": """request_id, prompt, prompt_token_ids, prompt_logprobs,
        prompt_token_id_logprobs, outputs, finished, metrics, num_cached_tokens, add, lora_request,
        encoder_prompt, encoder_prompt_token_ids, num_cache_creation_tokens, kv_transfer_params,
        ec_transfer_params""",
    "Fields of `CompletionOutput`": """index, text, token_ids, cumulative_logprob, logprobs, finish_reason,
        stop_reason, finished, lora_request, routed_experts, sampling_mask, spec_decode_metrics,
        weight_versions""",
    "Fields of `Logprob`": "logprob, rank, decoded_token",
    "Finish reasons": "stop, length, abort, error, repetition, tool_calls",
    "Fields of `PoolingRequestOutput`": """request_id, outputs, prompt_token_ids, num_cached_tokens, finished,
        error, outputs.embedding, outputs.probs, outputs.score, outputs.data""",
    "Methods of `AsyncLLM`": """from_engine_args, from_vllm_config, generate, encode, add_request, abort,
        check_admission, pause_generation, resume_generation, is_paused, sleep, wake_up, is_sleeping,
        reset_prefix_cache, reset_mm_cache, reset_encoder_cache, add_lora, remove_lora, pin_lora, list_loras,
        start_profile, stop_profile, check_health, do_log_stats, is_tracing_enabled, get_tokenizer,
        get_supported_tasks, collective_rpc, wait_for_requests_to_drain, scale_elastic_ep,
        checkpoint_prepare, checkpoint_restore, shutdown, is_running, is_stopped, errored, dead_error""",
    "Arguments of `AsyncLLM.generate`": """prompt, sampling_params, request_id, prompt_text, lora_request,
        tokenization_kwargs, trace_headers, priority, data_parallel_rank, session_id, kv_hints,
        StreamingInput""",
    "Commands": """serve, chat, complete, bench latency, bench throughput, bench serve, bench startup,
        bench sweep, bench mm-processor, run-batch, collect-env, launch render, preload, snapshot,
        download-kernels, --version, --config, _ or -, --flag.field, -O0 … -O3, --help=page, --omni""",
    "Engine options": """--model, --served-model-name, --tokenizer, --tokenizer-mode, --trust-remote-code,
        --dtype, --max-model-len, --quantization, --load-format, --download-dir, --revision, --seed,
        --tensor-parallel-size, --pipeline-parallel-size, --data-parallel-size, --enable-expert-parallel,
        --distributed-executor-backend, --gpu-memory-utilization, --kv-cache-memory-bytes, --kv-cache-dtype,
        --block-size, --enable-prefix-caching, --prefix-caching-hash-algo, --num-gpu-blocks-override,
        --max-num-seqs, --max-num-batched-tokens, --enable-chunked-prefill, --long-prefill-token-threshold,
        --scheduling-policy, --async-scheduling, --max-num-queued-reqs, --max-num-queued-tokens,
        --stream-interval, --enforce-eager, --optimization-level, --compilation-config, --performance-mode,
        --attention-backend, --speculative-config, --spec-method, --spec-model, --spec-tokens, --enable-lora,
        --max-loras, --max-lora-rank, --max-cpu-loras, --lora-modules, --limit-mm-per-prompt,
        --mm-processor-cache-gb, --allowed-local-media-path, --allowed-media-domains,
        --structured-outputs-config, --reasoning-parser, --enable-auto-tool-choice, --tool-call-parser,
        --tool-strict-level, --chat-template, --chat-template-content-format, --trust-request-chat-template,
        --generation-config, --override-generation-config, --max-logprobs, --logprobs-mode, --runner,
        --convert, --pooler-config, --cpu-offload-gb, --kv-offloading-size, --kv-offloading-backend,
        --kv-transfer-config, --kv-events-config, --enable-sleep-mode, --shutdown-timeout,
        --otlp-traces-endpoint, --disable-log-stats, --enable-log-requests, --host, --port, --uds, --api-key,
        --ssl-keyfile, --ssl-certfile, --ssl-ca-certs, --root-path, --middleware, --allowed-origins,
        --enable-request-id-headers, --enable-prompt-tokens-details, --enable-force-include-usage,
        --enable-server-load-tracking, --sse-keep-alive-interval, --enable-per-request-metrics,
        --return-tokens-as-token-ids, --default-chat-template-kwargs, --response-role, --logits-processors,
        --worker-cls, --scheduler-cls, --worker-extension-cls, --hf-overrides, --model-impl""",
    "Environment variables": """VLLM_API_KEY, VLLM_LOGGING_LEVEL, VLLM_LOGGING_CONFIG_PATH,
        VLLM_LOG_STATS_INTERVAL, VLLM_CACHE_ROOT, VLLM_USE_MODELSCOPE, VLLM_HOST_IP, VLLM_PORT,
        VLLM_SERVER_DEV_MODE, VLLM_ALLOW_RUNTIME_LORA_UPDATING, VLLM_LORA_RESOLVER_CACHE_DIR, VLLM_PLUGINS,
        VLLM_WORKER_MULTIPROC_METHOD, VLLM_ENABLE_V1_MULTIPROCESSING, VLLM_ENGINE_READY_TIMEOUT_S,
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT, VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH, VLLM_ALLOW_LONG_MAX_MODEL_LEN, VLLM_BATCH_INVARIANT,
        VLLM_CPU_KVCACHE_SPACE, VLLM_CPU_OMP_THREADS_BIND, VLLM_TARGET_DEVICE, VLLM_NO_USAGE_STATS,
        VLLM_DO_NOT_TRACK, VLLM_IMAGE_FETCH_TIMEOUT, VLLM_VIDEO_FETCH_TIMEOUT, VLLM_AUDIO_FETCH_TIMEOUT,
        VLLM_MAX_N_SEQUENCES, VLLM_MAX_STOP_STRINGS, VLLM_MAX_COMPLETION_PROMPTS, VLLM_DISABLE_COMPILE_CACHE,
        VLLM_USE_RUST_FRONTEND, VLLM_USE_V2_MODEL_RUNNER, VLLM_SKIP_MODEL_NAME_VALIDATION,
        VLLM_ENABLE_RESPONSES_API_STORE, VLLM_ENABLE_COHERE_API, VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
        VLLM_XGRAMMAR_CACHE_MB, VLLM_REGEX_COMPILATION_TIMEOUT_S, VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS,
        HF_TOKEN, HF_HOME, CUDA_VISIBLE_DEVICES""",
}


class Row(NamedTuple):
    """One line of a table; `section` is its heading."""

    section: str
    name: str
    status: str
    note: str
    test: str

    @property
    def quoted(self) -> str:
        """The words of an error."""
        found = re.search(r'"([^"]+)"', self.note)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.section.replace('`', '')}: {self.name}"


def read_page() -> list[Row]:
    rows, section = [], ""
    for line in (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("| `") or re.match(r"\| A\d{3} \|", line):
            cells = [cell.strip().strip("`") for cell in line.strip("|").split(" |")]
            name, *feature, status, note, test = cells
            assert len(feature) == (name[1:].isdigit()), line
            rows.append(Row(section, name, status, note, test))
    return rows


ROWS = read_page()
NAMED = [row for row in ROWS if row.section in NAMES]


def test_no_feature_is_missing():
    expected = [f"A{number:03}" for first, last in ID_RANGES for number in range(first, last + 1)]
    assert [row.name for row in ROWS if row.section not in NAMES] == expected


@pytest.mark.parametrize("section", NAMES)
def test_no_name_is_missing(section):
    expected = re.split(r",\s+", NAMES[section])
    found = Counter(row.name for row in ROWS if row.section == section)
    assert not set(expected) - set(found)
    assert set(found.values()) == {1}
    more = {row.status for row in NAMED if row.section == section and row.name not in expected}
    assert more <= {"superset"}, "octavo's own"


def test_rows_say_what_their_status_needs():
    assert {row.status for row in ROWS} == set(STATUSES)
    for row in ROWS:
        assert bool(row.test) == (row.status in SHOWN), row
        assert row.note or row.status in SHOWN, row
        assert row.quoted or row.status != "refused", row


@cache
def defined_in(path: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


def test_the_tests_are_there():
    for row in ROWS:
        path, _, name = row.test.partition("::")
        assert not path or (path.startswith("tests/") and (ROOT / path).is_file()), row
        assert not name or name in defined_in(path), row


def field_of(kind):
    """Whether a class gives its objects something under a name; None by default is nothing."""

    def exists(name):
        is_struct = issubclass(kind, msgspec.Struct)
        listed = msgspec.structs.fields(kind) if is_struct else dataclasses.fields(kind)
        fields = {field.name: field for field in listed}
        given = name in fields and fields[name].default is not None
        return given or callable(getattr(kind, name, None))

    return exists


def takes(name):
    signature, text = inspect.signature(AsyncLLM.generate), AsyncLLM.generate.__doc__
    without_effect = re.search(r"^ *(.*): accepted without effect", text, re.MULTILINE)[1].split(", ")
    return name in {*signature.parameters, *KEYWORDS} and name not in without_effect


def makes_a_prompt(name):
    forms = {"str": "a", "list[int]": [1], "prompt_embeds": {"prompt_embeds": [[0.5]]}}
    of_media = {"multi_modal_data": {}, "multi_modal_uuids": {}, "mm_processor_kwargs": {}}
    key = {"prompt_token_ids": [1], "cache_salt": "s", **of_media}.get(name, "a")
    try:
        parse_prompt(forms.get(name, {"prompt": "a", name: key}))
    except OctavoError as error:
        return name in str(error) and name == "prompt_embeds"  # known, but this is no tensor
    return True


def can_import(name):
    """Whether the path has a name that is there."""
    return name in MODULES or name in PROGRAMS or any(entry in HOMES for entry in entries(name).values())


def has_command(name):
    return name in COMMANDS or any(known.startswith(f"{name} ") for known in COMMANDS)


EXISTS = {
    "Names at the top": lambda name: name in octavo.__all__ and hasattr(octavo, name),
    "Modules": can_import,
    "Keywords of `LLM`": lambda name: name in OPTIONS,
    "Methods of `LLM`": lambda name: callable(getattr(LLM, name, None)),
    "Forms of a prompt": makes_a_prompt,
    "Fields of `SamplingParams`": lambda name: name in SamplingParams.__struct_fields__,
    "Fields of `BeamSearchParams`": lambda name: name in octavo.BeamSearchParams.__dataclass_fields__,
    "Fields of `PoolingParams`": lambda name: name in octavo.PoolingParams.__struct_fields__,
    "Fields of `LoRARequest`": lambda name: name in octavo.LoRARequest.__struct_fields__,
    "Fields of `RequestOutput`": field_of(octavo.RequestOutput),
    "Fields of `CompletionOutput`": field_of(octavo.CompletionOutput),
    "Fields of `Logprob`": field_of(octavo.Logprob),
    "Finish reasons": lambda name: name in {*FinishReason, *get_args(ToldFinishReason)},
    "Fields of `PoolingRequestOutput`": lambda name: "PoolingRequestOutput" in octavo.__all__,
    "Methods of `AsyncLLM`": lambda name: hasattr(AsyncLLM, name),
    "Arguments of `AsyncLLM.generate`": takes,
    "Commands": has_command,
    "Engine options": lambda name: name.removeprefix("--").replace("-", "_") in FLAGS,
    "Environment variables": lambda name: name in inspect.getsource(env),
}
ELSEWHERE = {
    *("--version", "--config", "_ or -", "--flag.field", "--help=page", "serve --models", "serve (Ollama)"),
    "StreamingInput",  # a kind of prompt
    "initialize_ray_cluster",  # under vLLM's names alone
    *("metrics", "num_cached_tokens", "num_cache_creation_tokens"),  # None until there is something to say
    *("routed_experts", "spec_decode_metrics"),  # the same
    *(
        "prompt_token_id_logprobs",
        "lora_request",
        "encoder_prompt",
        "encoder_prompt_token_ids",
        "kv_transfer_params",
    ),  # None until there is something to say
    *("cumulative_logprob", "logprobs", "finish_reason", "stop_reason", "rank", "decoded_token"),
    "weight_versions",
    *("HF_TOKEN", "HF_HOME", "CUDA_VISIBLE_DEVICES"),  # read by libraries
}
"""Names that work and do not show it cheaply; their tests do."""


def test_every_section_is_checked():
    assert set(EXISTS) == set(NAMES) == {row.section for row in NAMED}


def test_what_works_exists():
    for row in NAMED:
        assert row.status not in SHOWN or row.name in ELSEWHERE or EXISTS[row.section](row.name), row


def test_what_is_not_there_yet_is_not_there():
    for row in NAMED:
        assert row.status != "not yet" or not EXISTS[row.section](row.name), f"{row} is there: say so"


def ask_for(row: Row) -> None:
    """Ask for the row's name with a value that is not neutral. Raises what a user would see."""
    name = row.name.removeprefix("--").replace("-", "_")
    match row.section:
        case "Engine options" if name in SERVER:
            translate({name: "wanted"}, (), SERVER_ALIASES, SERVER)
        case "Keywords of `LLM`" | "Engine options":
            EngineArgs.from_options({name: True if name in OPTIONS else "wanted"})
        case "Methods of `LLM`":
            getattr(object.__new__(LLM), name)(None)
        case "Methods of `AsyncLLM`":
            engine = object.__new__(AsyncLLM)
            engine.operator = None
            asyncio.run(getattr(engine, name)(None))
        case "Arguments of `AsyncLLM.generate`" if row.status == "not applicable":
            assert name in inspect.signature(AsyncLLM.generate).parameters
        case "Arguments of `AsyncLLM.generate`":
            RequestOptions.parse({name: 5})
        case "Forms of a prompt":
            parse_prompt({"prompt": "a", name: {"image": 1}})
        case "Fields of `BeamSearchParams`":
            octavo.BeamSearchParams(2, 4, **{name: {"regex": "a"}})
        case "Fields of `LoRARequest`":
            octavo.LoRARequest("a", 1, "path", **{name: True})
        case "Fields of `SamplingParams`":
            SamplingParams(**{name: True if name == "skip_clone" else 5})


@pytest.mark.parametrize("row", [row for row in NAMED if row.status == "refused"], ids=str)
def test_what_is_refused_is_refused_with_that_text(row):
    with pytest.raises(OctavoError, match=re.escape(row.quoted)):
        ask_for(row)


@pytest.mark.parametrize("row", [row for row in NAMED if row.status == "not applicable"], ids=str)
def test_what_asks_for_nothing_is_let_pass(row):
    ask_for(row)


@cache
def texts() -> str:
    """Every string of the source."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "octavo").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return "\n".join([*(str(node.value) for node in nodes), *(foreign.text for foreign in ENGINE.values())])


def test_texts_of_refused_features_are_in_the_code():
    for row in ROWS:
        assert row.status != "refused" or row in NAMED or row.quoted in texts(), row
