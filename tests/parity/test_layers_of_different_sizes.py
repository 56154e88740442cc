"""Layers whose tokens take different numbers of bytes, over one pool: Gemma 4, by transformers' code.

Its global layers have heads of another size than its local ones. What transformers gives without our cache is
the reference: for long and short prompts in chunks, prefix hits, and requests that lose their blocks.
"""

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import Unsupported
from octavo.runtime.worker.request_state import RequestState
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, save

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
