import dataclasses
import json
import logging
import sys
from pathlib import Path

import pytest

from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.config import resolve_parallel
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.dtypes import choose_dtype
from octavo.config.resolve import describe, resolve

resolve_module = sys.modules[resolve.__module__]  # its package has a function of the same name
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 512}


@pytest.fixture
def model(tmp_path):
    """Writes a model folder without weights, by default with a safetensors file of no content."""

    def write(weights="model.safetensors", **config):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        if weights:
            (folder / weights).touch()
        return str(folder)

    return write


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of eight cores without a GPU, whatever runs the test."""
    monkeypatch.setattr(resolve_parallel, "usable_cores", lambda: 8)
    monkeypatch.setattr(resolve_parallel, "find_device", lambda: "cpu")


def test_open_options_are_decided_for_a_cpu(model):
    config = resolve(EngineArgs(model=model()))
    assert (config.parallel.device, config.parallel.cpu_threads) == ("cpu", 8)
    assert config.parallel.distributed_executor_backend == "inproc"
    assert (config.model.dtype, config.cache.kv_cache_dtype) == ("float32", "float32")
    assert (config.model.load_format, config.model.max_model_len) == ("safetensors", 512)
    assert config.cache.block_size == 16
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 4096)
    assert config.scheduler.steps_in_flight == 1


def test_sampling_defaults_of_another_folder(model, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    folder = model()
    Path(folder, "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 3}')
    config = resolve(EngineArgs(model=folder, generation_config=str(tmp_path)))
    assert config.checkpoint.generation_config == {"eos_token_id": 7, "temperature": 0.5}
    with pytest.raises(ConfigError, match=r"neither auto .* nor a folder with a generation_config"):
        resolve(EngineArgs(model=folder, generation_config="/no/folder"))


@pytest.mark.parametrize(
    ("given", "served"), [("one", ["one"]), (["one", "two"], ["one", "two"]), ("", None), ([], None)]
)
def test_names_that_are_served(model, given, served):
    config = resolve(EngineArgs(model=model(), served_model_name=given))
    assert config.served_names == (served or [config.model.model])


def test_open_options_are_decided_for_a_gpu(model, monkeypatch):
    monkeypatch.setattr(resolve_parallel, "find_device", lambda: "cuda")
    config = resolve(EngineArgs(model=model()))
    assert (config.parallel.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.cache.block_size, config.scheduler.steps_in_flight) == (64, 2)
    assert config.scheduler.max_num_batched_tokens == 16384


def test_a_built_in_model_says_how_to_sample_it(model, monkeypatch):
    folder = Path(model())
    monkeypatch.setattr(resolve_module, "locate", lambda *_args, **_options: folder)
    assert resolve(EngineArgs(model="smollm2")).checkpoint.generation_config == {"temperature": 0.0}
    assert resolve(EngineArgs(model=str(folder))).checkpoint.generation_config == {}
    monkeypatch.undo()
    monkeypatch.chdir(folder.parent)
    folder.rename("smollm2")
    assert resolve(EngineArgs(model="smollm2", device="cpu")).checkpoint.generation_config == {}


def test_what_the_user_says_stays(model):
    args = EngineArgs(
        model=model(),
        dtype="half",
        kv_cache_dtype="bfloat16",
        max_model_len=128,
        block_size=32,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        steps_in_flight=3,
        cpu_threads=2,
        distributed_executor_backend="mine.module:Executor",
    )
    config = resolve(args)
    assert (config.model.dtype, config.cache.kv_cache_dtype) == ("float16", "bfloat16")
    assert (config.model.max_model_len, config.cache.block_size) == (128, 32)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (4, 64)
    assert (config.scheduler.steps_in_flight, config.parallel.cpu_threads) == (3, 2)
    assert config.parallel.distributed_executor_backend == "mine.module:Executor"


def test_a_cache_of_8_bits_is_another_on_each_device(model, monkeypatch):
    with pytest.raises(ConfigError, match="needs a GPU"):
        resolve(EngineArgs(model=model(), kv_cache_dtype="fp8"))
    for name in ("int8", "int8_per_token_head"):
        assert resolve(EngineArgs(model=model(), kv_cache_dtype=name)).cache.kv_cache_dtype == "int8"
    monkeypatch.setattr(resolve_parallel, "find_device", lambda: "cuda")
    config = resolve(EngineArgs(model=model(), kv_cache_dtype="fp8"))
    assert config.cache.kv_cache_dtype == "float8_e4m3fn"
    with pytest.raises(ConfigError, match="needs a CPU; on a GPU use 'fp8'"):
        resolve(EngineArgs(model=model(), kv_cache_dtype="int8"))


@pytest.mark.parametrize(
    ("stored", "decided"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("int8", "float32")]
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_stored_dtype_is_kept(model, key, stored, decided):
    assert resolve(EngineArgs(model=model(**{key: stored}))).model.dtype == decided


def test_the_dtype_of_the_whole_is_that_of_its_text():
    """As configs of models with encoders say it; a text part's own comes first."""
    config = {"text_config": {"hidden_size": 8}, "dtype": "float16"}
    checkpoint = Checkpoint(path="p", format="safetensors", config=config)
    assert choose_dtype("auto", checkpoint, "cpu") == "float16"
    config["text_config"]["torch_dtype"] = "bfloat16"
    assert choose_dtype("auto", checkpoint, "cpu") == "bfloat16"


def test_ranks_share_the_cores(model):
    parallel = resolve(EngineArgs(model=model(), tensor_parallel_size=2)).parallel
    assert (parallel.cpu_threads, parallel.distributed_executor_backend) == (4, "mp")


TWO_NODES = {"nnodes": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nnodes": 0}, "nnodes must be at least 1, got 0"),
        ({"node_rank": 1}, r"node_rank \(1\) must be less than nnodes \(1\)"),
        (TWO_NODES | {"node_rank": 2}, r"node_rank \(2\) must be less than nnodes \(2\)"),
        (TWO_NODES | {"tensor_parallel_size": 3}, "nnodes=2 does not divide the 3 ranks"),
        (TWO_NODES | {"distributed_executor_backend": "ray"}, "nnodes=2 needs .*'mp', got 'ray'"),
        (TWO_NODES | {"data_parallel_size": 2}, "start each replica alone"),
        (TWO_NODES | {"node_timeout": 0.0}, "node_timeout must be above 0"),
        (TWO_NODES, "set the variable OCTAVO_NODE_KEY"),
    ],
)
def test_impossible_nodes_are_refused(model, options, says):
    with pytest.raises((ConfigError, Unsupported), match=says):
        resolve(EngineArgs(model=model(), **options))


def test_ranks_lie_node_by_node(model, monkeypatch):
    monkeypatch.setenv("OCTAVO_NODE_KEY", "k" * 16)
    sizes = {"nnodes": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "node_rank": 1}
    parallel = resolve(EngineArgs(model=model(), **sizes)).parallel
    assert (list(parallel.node_ranks), parallel.cpu_threads) == ([2, 3], 4)


def test_many_requests_raise_the_token_budget(model):
    assert resolve(EngineArgs(model=model(), max_num_seqs=9000)).scheduler.max_num_batched_tokens == 9000


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt(model):
    path = model(max_position_embeddings=8192)
    config = resolve(EngineArgs(model=path, enable_chunked_prefill=False))
    assert config.scheduler.max_num_batched_tokens == 8192


def test_overrides_reach_the_checkpoint(model):
    args = EngineArgs(model=model(), hf_overrides={"max_position_embeddings": 1024}, max_model_len=1024)
    assert resolve(args).model.max_model_len == 1024


@pytest.mark.parametrize("asked", [-1, "auto"])
def test_a_length_that_fits_is_at_most_the_models(model, asked):
    config = resolve(EngineArgs(model=model(max_position_embeddings=4096), max_model_len=asked))
    assert config.fit_max_model_len
    assert config.model.max_model_len == 4096
    assert not resolve(EngineArgs(model=model())).fit_max_model_len


def test_the_environment_decides_what_the_user_does_not(model, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3.5")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")
    monkeypatch.setenv("OCTAVO_STALL_TIMEOUT", "40")
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "7")
    monkeypatch.setenv("VLLM_VIDEO_FETCH_TIMEOUT", "70")
    monkeypatch.setenv("VLLM_AUDIO_FETCH_TIMEOUT", "17")
    config = resolve(EngineArgs(model=model(), device="cpu"))
    assert (config.observability.log_stats_interval_s, config.cache.kv_cache_memory_bytes) == (3.5, 2 << 30)
    assert config.front.stall_timeout == 40
    media = config.media
    assert (media.media_fetch_timeout, media.video_fetch_timeout, media.audio_fetch_timeout) == (7, 70, 17)
    config = resolve(EngineArgs(model=model(), device="cpu", log_stats_interval_s=1, kv_cache_memory_bytes=9))
    assert (config.observability.log_stats_interval_s, config.cache.kv_cache_memory_bytes) == (1, 9)
    assert (
        resolve(EngineArgs(model=model(), device="cuda"), needs_device=False).cache.kv_cache_memory_bytes == 0
    )
    monkeypatch.setenv("OCTAVO_LOG_STATS_INTERVAL", "often")
    with pytest.raises(ConfigError, match="OCTAVO_LOG_STATS_INTERVAL='often' must be a number"):
        EngineArgs()


def test_a_folder_without_weights_runs_on_dummy_weights_only(model):
    assert resolve(EngineArgs(model=model(weights=""), load_format="dummy")).model.load_format == "dummy"
    with pytest.raises(ConfigError, match="load_format='dummy' runs it with random weights"):
        resolve(EngineArgs(model=model(weights="")))
    assert resolve(EngineArgs(model=model(), load_format="hf")).model.load_format == "safetensors"


def test_decisions_are_logged_once(model, caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        config = resolve(EngineArgs(model=model()))
    assert caplog.messages.count(describe(config)) == 1
    assert "LlamaForCausalLM" in describe(config)
    assert "512 tokens" in describe(config)


def test_weights_of_a_cpu_are_in_host_memory_already(model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    parallel = resolve(EngineArgs(model=model(), cpu_offload_gb=2)).parallel
    assert (parallel.cpu_offload_gb, parallel.offload_group_size) == (0, 0)
    assert "cpu_offload_* and offload_* have no effect" in caplog.text
    args = EngineArgs(model=model(), cpu_offload_gb=2, device="cuda")
    assert resolve(args, needs_device=False).parallel.cpu_offload_gb == 2


def test_a_gpu_that_is_not_here_is_missed_before_the_model_is_looked_for(monkeypatch):
    monkeypatch.setattr(resolve_parallel, "_WSL_GPU", "/no/such/device")
    monkeypatch.setattr(resolve_module, "locate", pytest.fail)
    with pytest.raises(ConfigError, match="device='cuda': there is no NVIDIA GPU here"):
        resolve(EngineArgs(model="some/model", device="cuda"))
    monkeypatch.setattr(resolve_module, "locate", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(resolve_parallel, "find_device", lambda: "cuda")
    with pytest.raises(ZeroDivisionError):
        resolve(EngineArgs(model="some/model", device="cuda"))


def test_installed_packages_bring_logits_processors(model, monkeypatch, tmp_path):
    for group in ("vllm.logits_processors", "octavo.logits_processors"):
        info = tmp_path / f"{group}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {group}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[{group}]\nmine = {group.partition('.')[0]}_extra.mine:Mine\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    config = resolve(EngineArgs(model=model(), logits_processors=["given.by:Name"]))
    assert config.model.logits_processors == [
        "vllm_extra.mine:Mine",
        "octavo_extra.mine:Mine",
        "given.by:Name",
    ]


def test_the_vocabulary_by_the_models_config(model):
    assert resolve(EngineArgs(model=model(vocab_size=77))).model.get_vocab_size() == 77


def test_reading_ahead_by_other_names(model):
    for given, meant in (("eager", "prefetch"), ("auto", "lazy"), (None, "lazy")):
        config = resolve(EngineArgs(model=model(), safetensors_load_strategy=given))
        assert config.model.safetensors_load_strategy == meant


def test_trust_remote_code_only_warns(model, caplog):
    with caplog.at_level(logging.WARNING, logger="octavo"):
        resolve(EngineArgs(model=model(), trust_remote_code=True))
    assert "never runs code from a model folder" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu_memory_utilization": 0.0}, r"must be between 0 and 1\. Got 0\.0"),
        ({"gpu_memory_utilization": 1.5}, r"must be between 0 and 1\. Got 1\.5"),
        ({"gpu_memory_utilization": float("nan")}, "must be between 0 and 1"),
        ({"tensor_parallel_size": 0}, "Invalid tensor parallel size: 0"),
        (
            {"tensor_parallel_size": 3, "hf_overrides": {"num_attention_heads": 4}},
            r"attention heads \(4\) must be divisible by tensor parallel size \(3\)",
        ),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "inproc"}, "use 'mp'"),
        ({"max_num_seqs": -1}, "max_num_seqs must be at least 0, got -1.*0 = by device"),
        ({"swap_space": -0.5}, "swap_space must be at least 0"),
        ({"max_model_len": -2}, "max_model_len must be at least -1, got -2"),
        ({"max_model_len": 513}, "longer than the 512 positions"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be of type int, got '4'"),
        ({"max_num_seqs": True}, "max_num_seqs must be of type int, got True"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be of type bool"),
        ({"hf_overrides": []}, "hf_overrides must be of type dict"),
        ({"dtype": "int8"}, "dtype='int8' is not one of auto, float32"),
        ({"device": "tpu"}, "device='tpu' is not one of auto, cpu, cuda"),
        ({"distributed_executor_backend": "slurm"}, "is not one of auto, inproc"),
        ({"load_format": "gguf"}, "load_format='gguf', but .* is safetensors"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"\(4\) must be at least max_num_seqs \(8\)"),
        ({"cpu_offload_gb": 1.0, "offload_group_size": 4}, "the same in two ways: give one"),
        ({"offload_group_size": 4, "offload_num_in_group": 5}, r"between 1 and offload_group_size \(4\)"),
        ({"cpu_offload_gb": -1.0}, "cpu_offload_gb must be at least 0"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 300},
            "chunked prefill is off: raise it, lower max_model_len",
        ),
    ],
)
def test_impossible_options_are_refused(model, options, says):
    with pytest.raises(ConfigError, match=says):
        resolve(EngineArgs(model=model(), **options))


def test_a_chunk_limit_needs_chunked_prefill(model):
    with pytest.raises(Unsupported, match="needs enable_chunked_prefill=True"):
        resolve(EngineArgs(model=model(), enable_chunked_prefill=False, long_prefill_token_threshold=64))


def test_options_by_name():
    args = EngineArgs.from_options({"max_num_seqs": 3, "dtype": None})
    assert (args.max_num_seqs, args.dtype) == (3, "auto")
    with pytest.raises(ConfigError, match=r"Unknown option max_seqs\. Known: .*max_num_seqs"):
        EngineArgs.from_options({"max_seqs": 3})


def test_every_option_explains_itself():
    for field in dataclasses.fields(EngineArgs):
        assert field.metadata["explain"].endswith("."), field.name
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        choices = field.metadata["choices"]
        assert not choices or default in choices, field.name
        resolve_module._check_field(field, default)


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"config\.json cannot be read as JSON"):
        resolve(EngineArgs(model=str(tmp_path)))


@pytest.mark.parametrize(
    "weights", [{"a": 0}, {"a": -1.0}, {"a": True}, {"a": "2"}, {3: 1.0}, {"a": float("inf")}]
)
def test_fair_weights_are_numbers_above_zero(model, weights):
    with pytest.raises(ConfigError, match="fair_weights must map names of tenants to numbers above 0"):
        resolve(EngineArgs(model=model(), fair_weights=weights))
    assert resolve(EngineArgs(model=model(), fair_weights={"a": 2})).scheduler.fair_weights == {"a": 2}


@pytest.mark.parametrize(("visible", "device"), [("1", "cuda"), ("0,1", "cuda"), ("", "cpu"), ("-1", "cpu")])
def test_gpus_that_are_hidden_are_not_chosen(model, monkeypatch, visible, device):
    monkeypatch.setattr(resolve_parallel, "find_device", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve(EngineArgs(model=model()), needs_device=False).parallel.device == device
    args = EngineArgs(model=model(), distributed_executor_backend="ray")
    assert resolve(args, needs_device=False).parallel.device == "cuda", "the workers have GPUs of their own"
