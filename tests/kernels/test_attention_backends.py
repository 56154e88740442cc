"""Every registered attention back end against plain causal attention, compiled kernels and references."""

import pytest
import torch
from torch.nn import functional

from octavo.base.errors import ConfigError, Unsupported
from octavo.messages.kv import HeadsKV
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.attention.registry import choose_backend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import HeadInputs, Scores
from octavo.runtime.kernels.cache_layout import CacheLayout
from octavo.runtime.platforms.platform import Platform, get_platform

SPEC = HeadsKV(2, 16, "float32", 2 * 2 * 16 * 4)


@pytest.fixture(params=[False, True], ids=["compiled", "references"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Platform:
    if request.param:
        monkeypatch.setenv("OCTAVO_NO_CPU_KERNELS", "1")
    return get_platform("cpu", 1)


@pytest.mark.parametrize("name", ["paged"])
def test_steps_over_a_cache_equal_one_attention(name: str, platform: Platform) -> None:
    backend = choose_backend([SPEC], platform, name)
    cache = CacheLayout(SPEC, 4).zeros(9, torch.device("cpu"))
    q, k, v = torch.randn(13, 6, 16), torch.randn(13, 2, 16), torch.randn(13, 2, 16)
    table = torch.tensor([[5, 2, 8, 1]], dtype=torch.int32)
    outputs = []
    for first, last in ((0, 7), (7, 12), (12, 13)):
        positions = torch.arange(first, last)
        slots = table[0, positions // 4].long() * 4 + positions % 4
        batch = ForwardBatch(
            input_ids=positions,
            positions=positions,
            cu_q_lens=torch.tensor([0, last - first], dtype=torch.int32),
            kv_lens=torch.tensor([last], dtype=torch.int32),
            kv_caches=[cache],
            groups=[GroupTables(table, slots)],
            group_of_layer=[0],
        )
        backend.plan(batch)
        new = HeadInputs(*(x[first:last] for x in (q, k, v)))
        outputs.append(backend.run(new, cache, batch.tables(0), batch, Scores(0.3)))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(torch.cat(outputs), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_choice_names_every_refusal(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedBackend, "supports", staticmethod(lambda spec, platform: "too tired"))
    with pytest.raises(Unsupported, match="paged: too tired"):
        choose_backend([SPEC], platform)
    with pytest.raises(ConfigError, match="Known: cudnn, flash_attn, flashinfer, paged"):
        choose_backend([SPEC], platform, "flash")


def test_cudnn_says_why_not(platform: Platform) -> None:
    with pytest.raises(Unsupported, match="cudnn: it needs an NVIDIA GPU"):
        choose_backend([SPEC], platform, "cudnn")
