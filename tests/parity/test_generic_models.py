"""Models that octavo has no file for: transformers' code over the paged cache, against transformers alone."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.helium.modeling_helium import HeliumMLP

from octavo import LLM, SamplingParams
from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.loader.loader import load_model
from octavo.runtime.models.generic import Generic
from octavo.runtime.platforms.platform import get_platform
from tests.model_driver import Driver, engine_config, given_logits, greedy, load, prompt_logits
from tests.tiny_models import (
    edit_config,
    make_oracle,
    make_prompts,
    oracle_greedy,
    oracle_logits,
    save,
    tiny_config,
)

# GPTBigCode, as some releases of transformers have it
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.matrix(3),
]

TOLERANCE = 1e-4
NUM_TOKENS = 24
VOCAB_SIZE = 131

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "ernie": GROUPED | {"model_type": "ernie4_5"},
    "exaone": GROUPED
    | {
        "model_type": "exaone4",
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": GROUPED | {"model_type": "glm"},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "helium": GROUPED | {"model_type": "helium"},
    "hyperclovax": GROUPED
    | {"model_type": "hyperclovax", "logits_scaling": 3.0, "attention_multiplier": 0.2},
    "nanochat": GROUPED | {"model_type": "nanochat", "final_logit_softcapping": 0.5},
    "nemotron": GROUPED | {"model_type": "nemotron"},
    "olmo": GROUPED | {"model_type": "olmo", "clip_qkv": 0.5},
    "olmoe": EXPERTS | {"model_type": "olmoe"},
    "persimmon": SIZES | {"model_type": "persimmon"},
    "qwen2_moe": EXPERTS
    | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
    "vaultgemma": GROUPED | {"model_type": "vaultgemma", "sliding_window": 12, "attn_logit_softcapping": 0.5},
}
WINDOWS = {"exaone": [12, 0], "qwen2_moe": [12, 0], "vaultgemma": [12, 0]}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """The oracle of one model, octavo's of the same checkpoint, and its name."""
    oracle = make_oracle(CONFIGS[request.param])
    oracle.set_attn_implementation("eager")  # the others know no soft cap
    folder = save(oracle, tmp_path_factory.mktemp(request.param))
    return oracle, load(folder, model_impl="transformers"), request.param


@pytest.fixture
def helium(tmp_path):
    """A checkpoint that octavo has no file for."""
    return save(make_oracle(CONFIGS["helium"]), tmp_path / "helium")


@pytest.mark.parametrize("chunk", [0, 1, 13], ids=["whole", "token_by_token", "chunks_of_13"])
def test_logits(pair, chunk):
    oracle, model, _ = pair
    prompts = make_prompts(VOCAB_SIZE)
    for logits, prompt in zip(prompt_logits(model, prompts, chunk), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


def test_greedy_tokens(pair):
    oracle, model, _ = pair
    prompts = make_prompts(VOCAB_SIZE)
    for prompt, output in zip(prompts, greedy(model, prompts, NUM_TOKENS), strict=True):
        assert output == oracle_greedy(oracle, prompt, output)


def test_layers_are_recognised(pair):
    oracle, model, name = pair
    assert isinstance(model, Generic)
    specs = [layer.kv_spec for layer in model.cache_layers]
    assert [spec.sliding_window for spec in specs] == WINDOWS.get(name, [0, 0])
    assert [layer.layer_id for layer in model.cache_layers] == [0, 1]
    for spec in specs:
        assert spec.bytes_per_token == 2 * spec.num_kv_heads * spec.head_dim * 4
    assert model.weight_bytes == sum(parameter.nbytes for parameter in oracle.parameters())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"])
def test_equal_to_octavos_own(tmp_path, architecture):
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    own, generic = load(folder, model_impl="octavo"), load(folder, model_impl="transformers")
    assert isinstance(generic, Generic)
    assert not isinstance(own, Generic)
    assert [x.kv_spec for x in own.cache_layers] == [x.kv_spec for x in generic.cache_layers]
    prompts = make_prompts(VOCAB_SIZE)
    for a, b in zip(prompt_logits(own, prompts), prompt_logits(generic, prompts), strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def test_widened_weights(tmp_path, caplog):
    folder = save(make_oracle(CONFIGS["helium"]).bfloat16(), tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    [prompt] = make_prompts(VOCAB_SIZE, (40,))
    with caplog.at_level(logging.INFO, "octavo"):
        model = load(folder, dtype="bfloat16")
    torch.testing.assert_close(
        prompt_logits(model, [prompt])[0], oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0
    )
    assert "HeliumForCausalLM runs by the code of transformers" in caplog.text
    assert "read as bfloat16" in caplog.text
    assert "of memory as float32" in caplog.text


def test_given_embeddings(tmp_path):
    """The embeddings of a prompt's tokens, given instead of the tokens, change nothing."""
    oracle = make_oracle(CONFIGS["helium"])
    model = load(save(oracle, tmp_path))
    [prompt] = make_prompts(VOCAB_SIZE, (9,))
    logits = given_logits(model, prompt, oracle.get_input_embeddings()(torch.tensor(prompt[:2])))
    torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


def test_random_weights(helium):
    """Without reading a weight, and the same every time."""
    (helium / "model.safetensors").write_bytes(b"")
    prompts = make_prompts(VOCAB_SIZE, (9,))
    first, second = (prompt_logits(load(helium, load_format="dummy"), prompts)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.std() > 0


@pytest.mark.parametrize("name", ["exaone", "olmoe"])
def test_through_the_engine(tmp_path, name):
    """Chunked prompts, several cache groups, prefix hits: the greedy tokens of transformers."""
    oracle = make_oracle(CONFIGS[name])
    folder = save(oracle, tmp_path)
    prompts = make_prompts(VOCAB_SIZE)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 200}
    with LLM(str(folder), max_num_seqs=3, max_num_batched_tokens=32, **options) as llm:
        for _ in range(2):
            wanted = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            for prompt, output in zip(prompts, llm.generate(prompts, wanted, use_tqdm=False), strict=True):
                tokens = list(output.outputs[0].token_ids)
                assert tokens == oracle_greedy(oracle, prompt, tokens)


REFUSED = {
    "alibi": (
        {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2},
        "attention interface .as models with ALiBi",
    ),
    "latent": (
        SIZES
        | {
            "model_type": "deepseek_v3",
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
        },
        "keys have 12 numbers per head, its values 8",
    ),
    "recurrent": (SIZES | {"model_type": "rwkv", "attention_hidden_size": 32}, "recurrent state"),
    "hybrid": (
        GROUPED | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "layers of kind conv",
    ),
    "sinks": (EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4}, "takes s_aux"),
    "chunks": (
        EXPERTS | {"model_type": "llama4_text", "attention_chunk_size": 8, "num_local_experts": 2},
        "layers of kind chunked_attention",
    ),
    "both_directions": (SIZES | {"model_type": "bert"}, "neither causal nor a sliding window"),
    "twice": (GROUPED | {"model_type": "diffllama"}, "runs one attention layer twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_cache_can_hold_is_refused(tmp_path, name):
    config, reason = REFUSED[name]
    folder = save(make_oracle({"vocab_size": VOCAB_SIZE} | config), tmp_path)
    with pytest.raises(Unsupported, match=rf"cannot run over octavo's paged cache.*{reason}"):
        load(folder, model_impl="transformers")


def test_state_outside_attention_is_noticed(tmp_path, monkeypatch):
    """A model that says nothing of a state it keeps: the comparison on a few tokens finds it."""
    forward = HeliumMLP.forward
    monkeypatch.setattr(HeliumMLP, "forward", lambda self, x: forward(self, x).cumsum(1))
    folder = save(make_oracle(CONFIGS["helium"]), tmp_path)
    with pytest.raises(Unsupported, match=r"logits differ by \d+\.\d%"):
        load(folder)


def test_unknown_architectures_are_refused(helium):
    edit_config(helium, architectures=["ForeignForCausalLM"], auto_map={"AutoModel": "foreign.Foreign"})
    (helium / "foreign.py").write_text("raise AssertionError('code from the folder runs')")
    with pytest.raises(ConfigError, match=r"'ForeignForCausalLM', and transformers .*own: .* Llama, "):
        load(helium)
    with pytest.raises(ConfigError, match="Unknown model architecture 'ForeignForCausalLM'"):
        load(helium, model_impl="octavo")


def test_what_a_config_names_is_never_run(helium):
    """Code beside a known architecture, kernels from a hub: the folder's wishes count for nothing."""
    (helium / "foreign.py").write_text("raise AssertionError('code from the folder runs')")
    edit_config(
        helium,
        auto_map={"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Foreign"},
        attn_implementation="someone/kernels",
        _attn_implementation="someone/kernels",
    )
    assert isinstance(load(helium, trust_remote_code=True), Generic)


def test_options_that_do_not_fit(helium):
    with pytest.raises(ConfigError, match="tensor_parallel_size=1"):
        load(helium, ParallelContext(Group(0, 2)))
    edit_config(helium, quantization_config={"quant_method": "gptq"})
    with pytest.raises(Unsupported, match="stored by 'gptq'"):
        load(helium)


def test_a_rope_that_follows_the_longest_request_is_bounded(helium):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    edit_config(helium, rope_parameters=rope, max_position_embeddings=128)
    with pytest.raises(ConfigError, match="use max_model_len=128"):
        load(helium)
    assert isinstance(load(helium, max_model_len=128), Generic)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"num_hidden_layers": 3}, r"lacks \d+ weights: model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"no place for, \d+ weights: model\.layers\.1"),
        ({"intermediate_size": 40}, r"in another shape \d+ weights: model\.layers\.0\.mlp"),
        ({"hidden_size": "wide"}, "refuses the config"),
    ],
)
def test_checkpoints_that_do_not_fit_their_config(helium, entries, reason):
    with pytest.raises(BadCheckpoint, match=reason):
        load(edit_config(helium, **entries))


def test_a_library_that_transformers_misses(helium, monkeypatch):
    def needs_more(layer, config):
        raise ImportError("HeliumMLP requires the timm library but it was not found in your environment.")

    monkeypatch.setattr(HeliumMLP, "__init__", needs_more)
    with pytest.raises(BadCheckpoint, match="from it: HeliumMLP requires the timm library"):
        load(helium)


def test_two_models_in_one_process(tmp_path):
    """Nothing is shared: steps of two models may alternate."""
    oracles = {name: make_oracle(CONFIGS[name], seed) for seed, name in enumerate(("glm", "ernie"))}
    models = [load(save(oracle, tmp_path / name)) for name, oracle in oracles.items()]
    [prompt] = make_prompts(VOCAB_SIZE, (20,))
    drivers = [Driver(model) for model in models]
    requests = [driver.add() for driver in drivers]
    parts = [[], []]
    for piece in (prompt[:11], prompt[11:]):
        for part, driver, request in zip(parts, drivers, requests, strict=True):
            part.append(driver.step({request: piece})[request])
    for part, oracle in zip(parts, oracles.values(), strict=True):
        torch.testing.assert_close(torch.cat(part), oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


def test_narrow_caches(helium):
    """Keys and values kept in 16 bits: the check at load is not disturbed by their rounding."""
    config = engine_config(helium)
    config = replace(config, cache=replace(config.cache, kv_cache_dtype="bfloat16"))
    model = load_model(config, get_platform("cpu", 1), ParallelContext())
    assert model.cache_layers[0].kv_spec.bytes_per_token == 2 * 2 * 8 * 2
