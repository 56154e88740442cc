"""Layers whose tokens take different numbers of bytes, over one pool, against transformers without our cache.

Gemma 4 by transformers' code, whose global layers have larger heads than its local ones; and a Gemma 3
made uneven, by our code: prompts in chunks, prefix hits, and requests that lose their blocks.
"""

import copy
from dataclasses import replace

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.base.errors import Unsupported
from octavo.runtime.models.gemma import Gemma3
from octavo.runtime.worker.recorded_calls import RecordedCalls
from octavo.runtime.worker.request_state import RequestState
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, save, tiny_config

VOCAB_SIZE = 131
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160}


def make(folder, **sizes):
    """A random checkpoint, and the model of which it is."""
    oracle = make_oracle(GEMMA4 | sizes)
    oracle.set_attn_implementation("eager")
    return oracle, save(oracle, folder)


def make_native(folder, monkeypatch):
    """A Gemma 3 whose global layers have one key head, the local ones two: octavo's own code runs it."""
    config = tiny_config("Gemma3ForCausalLM")
    oracle = make_oracle(config)
    few = copy.deepcopy(oracle.config)
    few.num_key_value_heads = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for layer in oracle.model.layers:
            if not layer.self_attn.is_sliding:
                layer.self_attn = type(layer.self_attn)(few, layer.self_attn.layer_idx).eval()
    read = Gemma3.arch_from_hf

    def uneven(config):
        arch = read(config)
        layers = [
            layer
            if layer.sliding_window
            else replace(layer, attention=replace(layer.attention, num_kv_heads=1))
            for layer in arch.layers
        ]
        return replace(arch, layers=tuple(layers))

    monkeypatch.setattr(Gemma3, "arch_from_hf", staticmethod(uneven))
    return oracle, save(oracle, folder)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
def test_octavos_own_layers(tmp_path, monkeypatch, enforce_eager):
    """Steps that are recorded and replayed, too: blocks of 16 and of 8 tokens."""
    oracle, folder = make_native(tmp_path, monkeypatch)
    replays, replay = [], RecordedCalls._replay
    monkeypatch.setattr(RecordedCalls, "_replay", lambda *given: replays.append(given) or replay(*given))
    options = {"block_size": 8, "num_gpu_blocks_override": 250, "enforce_eager": enforce_eager}
    are_equal, stats = run(oracle, folder, activations="float32", **options)
    assert are_equal and stats.prefix_hits > 0 and bool(replays) != enforce_eager


def run(oracle, folder, **options):
    """Whether all greedy tokens are those of transformers, the second time too; and the engine's figures."""
    prompts = make_prompts(VOCAB_SIZE, (1, 7, 40, 90, 33))
    wanted = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    are_equal = True
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=32, **(OPTIONS | options)) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, wanted, use_tqdm=False), strict=True):
                tokens = list(output.outputs[0].token_ids)
                are_equal &= tokens == oracle_greedy(oracle, prompt, tokens)
        return are_equal, llm.llm_engine.stats


SIZES = [
    ({"global_head_dim": 16}, 16),
    ({"global_head_dim": 24}, 4),
    ({"head_dim": 16, "global_head_dim": 24}, 8),  # blocks of 12 and 8 tokens
]


@pytest.mark.parametrize(("sizes", "block_size"), SIZES, ids=["2:1", "3:1", "3:2"])
def test_tokens(tmp_path, sizes, block_size):
    oracle, folder = make(tmp_path, **sizes)
    are_equal, stats = run(oracle, folder, block_size=block_size, num_gpu_blocks_override=2000 // block_size)
    assert are_equal and stats.prefix_hits > 0 and stats.num_preemptions == 0


def test_preempted_requests(tmp_path):
    oracle, folder = make(tmp_path, global_head_dim=16)
    for swap_space in (0.0, 0.001):
        options = {"block_size": 4, "num_gpu_blocks_override": 56, "swap_space": swap_space}
        are_equal, stats = run(oracle, folder, **options)
        assert are_equal and stats.num_preemptions > 0
        assert (stats.num_blocks_swapped_in > 0) == (swap_space > 0)


def test_one_block_size_for_all_would_be_noticed(tmp_path, monkeypatch):
    oracle, folder = make(tmp_path, global_head_dim=16)

    def as_if_all_were_alike(self, slots, positions):
        size = min(self.block_sizes)
        return self.host_tables[:, slots, positions // size].astype("int64") * size + positions % size

    monkeypatch.setattr(RequestState, "cache_slots", as_if_all_were_alike)
    assert not run(oracle, folder, block_size=4, num_gpu_blocks_override=500)[0]


def test_sizes_that_no_block_can_have(tmp_path):
    _, folder = make(tmp_path, head_dim=16, global_head_dim=24)
    with pytest.raises(Unsupported, match=r"blocks of 5 tokens .* must be a multiple of 2\. Set block_size"):
        LLM(str(folder), block_size=5, **OPTIONS)
