"""Two ranks, or two stages, give the logits of one: every model, packed weights, shared key heads."""

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.models.interface import MODELS
from tests.gguf_models import MIXED, write_gguf
from tests.model_driver import load, prompt_logits, rank_main
from tests.rank_processes import exit_codes
from tests.selection import is_whole
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

SIZE = 2
TOLERANCE = 1e-4
PACKED = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Every architecture, one with fewer key heads than ranks, special layouts, one with packed weights."""
    folder = tmp_path_factory.mktemp("models")
    configs = {name: tiny_config(name) for name in MODELS.names()}
    configs["one_key_head"] = tiny_config("Qwen3ForCausalLM") | {"num_key_value_heads": 1}
    own_norms = {"qk_layernorm": True, "num_key_value_heads": 1, "use_parallel_residual": True}
    one_key_head = {"num_key_value_heads": 1}
    configs["one_key_head_all_normalised"] = tiny_config("Olmo2ForCausalLM") | one_key_head
    configs["own_head_norms_2d"] = tiny_config("CohereForCausalLM") | one_key_head | {"use_qk_norm": True}
    configs["fused_groups_biased"] = tiny_config("InternLM2ForCausalLM") | one_key_head | {"bias": True}
    configs["own_head_norms"] = tiny_config("StableLmForCausalLM") | own_norms
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    configs["grouped_qkv"] = tiny_config("FalconForCausalLM") | grouped
    projected = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
    configs["projected_embeddings"] = tiny_config("OPTForCausalLM") | projected
    configs["norm_over_ranks_first"] = tiny_config("FalconH1ForCausalLM") | {"mamba_n_groups": 1}
    paths = {name: save(make_oracle(config), folder / name) for name, config in configs.items()}
    packed = make_oracle(tiny_config("LlamaForCausalLM") | PACKED)
    paths["packed"] = write_gguf(packed, folder / "packed.gguf", MIXED, "Q4_1")
    return paths


def has_experts(path):
    return path.is_dir() and "experts" in (path / "config.json").read_text()


@pytest.mark.parametrize(
    "sizes", [(SIZE, 1, False), (1, SIZE, False), (SIZE, 1, True)], ids=["ranks", "stages", "experts"]
)
def test_two_equal_one(checkpoints, tmp_path, request, sizes):
    prompts = make_prompts(vocab_size=131, lengths=(5, 33))
    if sizes[2]:
        checkpoints = {name: path for name, path in checkpoints.items() if has_experts(path)}
        assert len(checkpoints) >= 5
    if sizes[1] > 1 and not is_whole(request.config):
        checkpoints = dict([*checkpoints.items()][::3])
    paths, meeting = list(checkpoints.values()), tmp_path / "meeting"
    ranks = [(rank, sizes, paths, prompts, meeting) for rank in range(SIZE)]
    assert exit_codes(rank_main, ranks) == [0] * SIZE
    for number in range(SIZE - sizes[0], SIZE):  # of the last stage
        results = torch.load(meeting.with_suffix(f".{number}"))
        for name, result, path in zip(checkpoints, results, paths, strict=True):
            for logits, expected in zip(result, prompt_logits(load(path), prompts), strict=True):
                torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize(("size", "reason"), [(4, "columns"), (3, "attention heads")])
def test_impossible_sizes_are_refused(checkpoints, size, reason):
    """4 ranks would cut blocks of 32 columns, 3 do not divide the heads; no group is needed to find out."""
    with pytest.raises(ConfigError, match=reason):
        load(checkpoints["packed"], ParallelContext(Group(1, size)))
