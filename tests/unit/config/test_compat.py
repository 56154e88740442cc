"""Options of vLLM's that octavo has not, and configs by concern."""

import logging

import pytest

from octavo.base.errors import ConfigError
from octavo.config import CacheConfig, DeviceConfig, EngineArgs, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.config.concerns import from_concerns
from octavo.config.foreign import ALIASES, ENGINE
from tests import vllm_options

VLLM_LLM_DEFAULTS = {
    "runner": "auto",
    "convert": "auto",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "seed": 0,
    "gpu_memory_utilization": 0.92,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "enforce_eager": False,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "disable_custom_all_reduce": False,
    "hf_token": None,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": None,
    "quantization_config": None,
    "logits_processors": None,
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
}
"""The arguments of vLLM's `LLM` with their defaults."""


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="octavo")
    return caplog


def test_defaults_ask_for_nothing(lines):
    assert EngineArgs.from_options(VLLM_LLM_DEFAULTS) == EngineArgs()
    assert not lines.messages


@pytest.mark.parametrize("name", sorted(VLLM_LLM_DEFAULTS))
def test_every_name_is_known(name):
    known = set(EngineArgs.__dataclass_fields__) | set(ENGINE) | set(ALIASES)
    assert name in known


@pytest.mark.parametrize("name", vllm_options.ENGINE)
def test_every_option_of_vllm_is_taken_or_let_pass_or_refused_with_what_to_do(name):
    try:
        EngineArgs.from_options({name: "wanted"})
    except ConfigError as error:
        assert str(error).startswith(f"{name}='wanted'") and "Unknown option" not in str(error)


def test_what_has_no_effect_says_so_once(lines):
    assert EngineArgs.from_options({"compilation_config": {"level": 9}}) == EngineArgs()
    assert lines.messages == [
        "compilation_config has no effect. octavo compiles no graphs: there is nothing to configure."
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefill_context_parallel_size": 2}, "the cache by tokens: decode_context_parallel_size"),
        ({"device_ids": [1]}, "CUDA_VISIBLE_DEVICES"),
        ({"profiler_config": {"profiler": "torch"}}, "profiler_dir"),
        ({"nonsense": 1}, "Unknown option nonsense. Known: "),
    ],
)
def test_what_is_refused_says_why(options, says):
    with pytest.raises(ConfigError, match=says):
        EngineArgs.from_options(options)


def test_other_names_of_the_same():
    args = EngineArgs.from_options({"async_scheduling": True, "kv_offloading_size": 3})
    assert (args.steps_in_flight, args.swap_space) == (2, 3.0)
    assert EngineArgs.from_options({"async_scheduling": False}).steps_in_flight == 1
    assert EngineArgs.from_options({"async_scheduling": True, "steps_in_flight": 4}).steps_in_flight == 4


def test_foreign_names_are_foreign():
    own = set(EngineArgs.__dataclass_fields__)
    assert not own & set(ALIASES)
    for alias in ALIASES.values():
        assert alias.own in own


def test_six_configs_are_the_flat_arguments(lines):
    args = from_concerns(
        ModelConfig(model="m", seed=3),
        CacheConfig(block_size=8),
        ParallelConfig(),
        SchedulerConfig(max_num_seqs=4),
        DeviceConfig("cpu"),
        lora_config=None,
    )
    assert args == EngineArgs(model="m", seed=3, block_size=8, max_num_seqs=4, device="cpu")
    named = from_concerns(device_config=DeviceConfig(seed=5), model_config=ModelConfig(model="m"))
    assert named == EngineArgs(model="m", seed=5) == EngineArgs("m", seed=5)
    assert from_concerns(ModelConfig(), "env://") == EngineArgs()
    assert "distributed_init_method='env://' has no effect" in lines.text


def test_configs_take_the_keywords_that_articles_give_them(lines):
    args = from_concerns(
        ModelConfig(model="m", dtype="float32", trust_remote_code=False, tokenizer=None),
        CacheConfig(
            block_size=16, gpu_memory_utilization=0.9, swap_space=4, enable_kv_cache_compression=True
        ),
        ParallelConfig(tensor_parallel_size=1, pipeline_parallel_size=1),
        SchedulerConfig(
            max_num_seqs=8, max_model_len=512, max_num_batched_tokens=2048, enable_continuous_batching=True
        ),
        DeviceConfig(device="cpu", seed=42),
        lora_config=None,
        distributed_init_method="env://",
    )
    assert (args.max_model_len, args.max_num_seqs, args.swap_space, args.seed) == (512, 8, 4, 42)
    assert "enable_kv_cache_compression has no effect. Name a type of 8 bits" in lines.text
    with pytest.raises(ConfigError, match="Prompts are divided over ranks by heads"):
        from_concerns(ParallelConfig(prefill_context_parallel_size=2))
    with pytest.raises(ConfigError, match="Unknown option banana"):
        from_concerns(CacheConfig(banana=1))


def test_other_objects_are_no_configs():
    from octavo.config import LoRAConfig

    assert from_concerns(ModelConfig(), lora_config=LoRAConfig(enable_lora=True)).enable_lora
    with pytest.raises(ConfigError, match="dict is no config of octavo's"):
        from_concerns({"model": "m"})


def test_the_constructor_takes_what_llm_takes():
    args = EngineArgs(model="x", quantization=None, max_model_len=None, enable_lora=False, runner="auto")
    assert args == EngineArgs(model="x")
    with pytest.raises(ConfigError, match="Unknown option banana"):
        EngineArgs(banana=1)


def test_attention_by_vllms_names():
    from octavo.names.settings import AttentionConfig

    given = {"attention_backend": "FLASH_ATTN"}, {"attention_config": AttentionConfig(backend="FLASH_ATTN")}
    assert [EngineArgs.from_options(options).attention_backend for options in given] == ["FLASH_ATTN"] * 2
    assert EngineArgs.from_options({"attention_config": {"backend": None}}).attention_backend == "auto"
    with pytest.raises(ConfigError, match="cannot be read as attention_backend"):
        EngineArgs.from_options({"attention_config": {"version": 3}})
