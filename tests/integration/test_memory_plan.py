"""`octavo plan`: what it says before loading is what the engine then takes."""

import json

import pytest

from octavo.base.errors import ConfigError, Unsupported
from octavo.cli.main import main
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.engine.memory_plan import plan_memory
from octavo.runtime.platforms import cpu
from octavo.runtime.worker.memory_forecast import GPU_CONTEXT_BYTES, forecast
from octavo.runtime.worker.worker import Worker
from tests.tiny_models import tiny_config

GIB = 1 << 30


def config_of(path, **options):
    return resolve(EngineArgs(model=str(path), **options), needs_device=False)


@pytest.fixture
def make_folder(tmp_path):
    """A folder with a config only; fields change it."""

    def make(architecture="LlamaForCausalLM", **fields):
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(architecture) | fields))
        return tmp_path

    return make


@pytest.mark.parametrize("options", [{}, {"max_model_len": 100, "block_size": 8, "swap_space": 0.001}])
def test_the_engine_takes_what_the_plan_says(tiny_model, make_llm, options):
    options = {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 0, **options}
    plan = plan_memory(config_of(tiny_model, **options))
    llm = make_llm(tiny_model, **options)
    [held] = llm.collective_rpc("describe")
    assert (plan.weight_bytes, plan.kv_bytes) == (held["weight_bytes"], held["kv_cache_bytes"])
    assert plan.kv_bytes == plan.num_blocks * plan.kv_bytes_per_block
    assert plan.max_model_len == llm.model_config.max_model_len
    assert plan.host_bytes // GIB == 0 and (plan.host_bytes > 0) == ("swap_space" in options)
    assert plan.problem == "" and plan.num_sequences >= 4


@pytest.mark.parametrize(
    "architecture",
    ["Cohere2ForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "Phi3ForCausalLM"],
)
def test_the_forecast_is_what_a_worker_reports(make_folder, architecture):
    config = config_of(make_folder(architecture), load_format="dummy", device="cpu", max_num_seqs=3)
    worker = Worker(config)
    ready, told = worker.load(), forecast(config, 64 * GIB)
    worker.close()
    assert told.ready.groups == ready.groups
    assert told.ready.weight_bytes == ready.weight_bytes > 0
    assert told.ready.workspace_bytes == ready.workspace_bytes == told.table_bytes
    share = config.cache.gpu_memory_utilization
    assert told.ready.available_bytes == int(share * (64 * GIB - ready.weight_bytes)) - ready.workspace_bytes


def test_blocks_of_a_gguf_file_are_counted_by_its_header(smollm2_path, monkeypatch):
    monkeypatch.setattr(cpu, "free_bytes", lambda: 8 * GIB)
    config = config_of(smollm2_path, max_model_len=512, device="cpu")
    plan = plan_memory(config)
    size = smollm2_path.stat().st_size
    assert 0.9 * size < plan.weight_bytes <= size, "the rest is header and vocabulary"
    assert plan.kv_bytes_per_token == 2 * 30 * 3 * 64 * (4 if plan.kv_cache_dtype == "float32" else 2)


def test_a_gpu_that_is_not_here(make_folder):
    """By hand: weights, activations and logits of a model with sizes that nothing hides behind."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    folder = make_folder(
        **sizes, num_key_value_heads=2, num_hidden_layers=2, vocab_size=50000, tie_word_embeddings=False
    )
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 64, "max_model_len": 256}
    config = config_of(folder, device="cuda", max_num_batched_tokens=4096, **options)
    plan = plan_memory(config, 8 * GIB)
    matrices = 1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 4096
    assert plan.weight_bytes == 2 * (2 * 50000 * 1024 + 2 * (matrices + 2 * 1024) + 1024)
    assert plan.kv_bytes_per_token == 2 * 2 * 2 * 128 * 2 and plan.kv_bytes_per_block == 64 * 2048
    hidden, logits = 4096 * 1024 * 2, 64 * 50000 * 2
    assert 4096 * 2 * 4096 * 2 + 2 * hidden <= plan.step_bytes <= 4096 * 3 * 4096 * 2 + 5 * hidden
    assert logits < plan.recorded_bytes < logits + (2 << 20)
    left = int(0.92 * 8 * GIB) - GPU_CONTEXT_BYTES - plan.weight_bytes
    assert plan.kv_available_bytes == left - plan.step_bytes - plan.recorded_bytes - plan.table_bytes
    assert plan.num_blocks == plan.kv_available_bytes // plan.kv_bytes_per_block
    assert (
        plan_memory(config_of(folder, device="cuda", enforce_eager=True, **options), GIB).recorded_bytes == 0
    )


def test_weights_in_host_memory_leave_room(make_folder):
    folder = make_folder(num_hidden_layers=8)
    options = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8}
    parts = {"offload_group_size": 4, "offload_prefetch_step": 1}
    whole, part = (plan_memory(config_of(folder, **options, **more), 4 * GIB) for more in ({}, parts))
    layer = part.host_weight_bytes // 2
    assert whole.host_weight_bytes == 0 and layer == 2 * (48 * (48 + 32) + 48 * 48 + 3 * 48 * 96)
    assert part.weight_bytes == whole.weight_bytes
    assert part.kv_available_bytes == whole.kv_available_bytes, "two layers, and as many buffers"
    options |= {"offload_group_size": 2, "offload_prefetch_step": 1}
    more = plan_memory(config_of(folder, **options), 4 * GIB)
    assert more.kv_available_bytes == whole.kv_available_bytes + 2 * layer


def test_experts_in_host_memory_leave_room(make_folder):
    """But for a copy of one per layer, and for all of a layer."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = make_folder(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **experts)
    options = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8}
    parts = {"cpu_offload_experts": -1, "expert_cache_gb": 0.0}
    whole, part = (plan_memory(config_of(folder, **options, **more), 4 * GIB) for more in ({}, parts))
    layer = 8 * 3 * 32 * 48 * 2
    layers, rest = divmod(part.host_weight_bytes, layer)
    assert layers >= 2 and not rest and whole.host_weight_bytes == 0
    freed = layers * layer - (layers * layer // 8 + layer)
    assert part.kv_available_bytes == whole.kv_available_bytes + freed


def test_experts_that_cannot_stay_in_host_memory(make_folder, monkeypatch):
    options = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "cpu_offload_experts": "all"}
    with pytest.raises(ConfigError, match="the first layers of this model have no experts"):
        plan_memory(config_of(make_folder(), **options), 4 * GIB)
    packed = {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(Unsupported, match="Packed weights stay on the GPU"):
        plan_memory(config_of(make_folder("GptOssForCausalLM", **packed), **options), 4 * GIB)
    monkeypatch.setattr(cpu, "free_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"The experts take .* GiB of host memory per GPU; .* are free"):
        plan_memory(config_of(make_folder("Qwen3MoeForCausalLM"), **options), 4 * GIB)


def test_each_rank_has_its_part(make_folder):
    folder = make_folder(vocab_size=1000)
    options = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8}
    whole, half = (
        plan_memory(config_of(folder, tensor_parallel_size=size, **options), 4 * GIB) for size in (1, 2)
    )
    assert half.num_ranks == 2 and half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert whole.weight_bytes / 2 < half.weight_bytes < whole.weight_bytes / 2 * 1.1
    assert half.step_bytes > 8 * 1000 * 2, "every rank has all logits"


def test_ranks_that_divide_the_cache(make_folder):
    folder = make_folder(vocab_size=1000, num_key_value_heads=1)
    options = {"load_format": "dummy", "tensor_parallel_size": 2}
    whole, part = (
        plan_memory(config_of(folder, decode_context_parallel_size=size, **options), 4 * GIB)
        for size in (1, 2)
    )
    assert part.block_size == 2 * whole.block_size and part.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    with pytest.raises(ConfigError, match="must be greater than total num kv heads 2"):
        plan_memory(config_of(make_folder(num_key_value_heads=2), decode_context_parallel_size=2, **options))


def test_the_command(make_folder, capsys):
    folder = str(make_folder(vocab_size=1000))
    options = ["--load-format", "dummy", "--device-memory", "2GiB", "--max-num-seqs", "8"]
    assert main(["plan", folder, *options]) == 0
    text = capsys.readouterr().out
    assert "cuda x 1" in text and "requests of max_model_len=256 at once" in text
    assert text.rstrip().endswith("It fits.")
    assert main(["plan", "--model", folder, *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problem"] == "" and plan["num_tokens"] == int(plan["num_sequences"] * 256)
    assert f"{plan['num_blocks']} blocks" in text


def test_what_cannot_fit_is_said_with_what_to_change(make_folder, capsys):
    folder = str(make_folder(vocab_size=1000))
    options = ["--load-format", "dummy", "--device-memory", "640MiB", "--max-num-seqs", "8"]
    assert main(["plan", folder, *options]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "needs" in last and "there is room for 0" in last and "gpu_memory_utilization" in last
    assert main(["plan", folder, *options, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problem"] == last


def test_models_of_foreign_code_are_known_once_they_are_loaded(make_folder, capsys):
    assert main(["plan", str(make_folder(architectures=["BloomForCausalLM"])), "--load-format", "dummy"]) == 2
    assert "runs by transformers' code" in capsys.readouterr().err
