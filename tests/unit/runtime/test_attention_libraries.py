"""Attention by flash-attn and flashinfer: modules with their signatures that compute by torch.

The libraries run on GPUs only. What is tested is what they are given: its shapes, layouts, lengths and order.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from octavo.base.errors import Unsupported
from octavo.messages.kv import HeadsKV, LatentKV
from octavo.runtime.attention import flash_attention, library
from octavo.runtime.attention.flash_attention import FlashAttentionBackend
from octavo.runtime.attention.flashinfer import FlashInferBackend
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.attention.registry import choose_backend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import Scores
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.platforms.platform import Platform
from tests.kernel_cases import make_paged

SPEC = HeadsKV(2, 64, "bfloat16", 2 * 2 * 64 * 2)


def attend(q, keys, values, *, scale, window, cap):
    """One request: the last queries of its keys, [n, heads, size]; window: (left, right), -1 = none."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    ago = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (ago < 0) | ((ago > window[0]) if window[0] >= 0 else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).to(q.dtype)


def over_pages(q, keys, values, tables, starts, lens, **how):
    """All requests, over pages that their tables name."""
    made = []
    for row, length in enumerate(lens):
        pages = tables[row][: -(-length // keys.shape[1])].long()
        own = [x[pages].flatten(0, 1)[:length] for x in (keys, values)]
        made.append(attend(q[starts[row] : starts[row + 1]], *own, **how))
    return torch.cat(made)


class FlashAttention:
    """flash-attn's functions, versions 2.8 and 3."""

    calls = 0

    @classmethod
    def flash_attn_varlen_func(
        cls, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert causal and k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert q.is_contiguous() and k.stride(-1) == 1 and cu_seqlens_k.dtype == torch.int32
        starts, lens = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= max(lens)
        cls.calls += 1
        how = {"scale": softmax_scale, "window": window_size, "cap": softcap}
        return over_pages(q, k, v, block_table, starts, lens, **how)

    @classmethod
    def flash_attn_with_kvcache(
        cls, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
        v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
        sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert causal and cache_seqlens.dtype == page_table.dtype == torch.int32
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        cls.calls += 1
        how = {"scale": softmax_scale, "window": window_size, "cap": softcap}
        return over_pages(
            q, k_cache, v_cache, page_table, cu_seqlens_q.tolist(), cache_seqlens.tolist(), **how
        )


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer's, version 0.6."""

    calls = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
    ):  # fmt: skip
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None,
        causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        non_blocking=True,
    ):  # fmt: skip
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk) == (8, 2, 64)
        starts, ends = qo_indptr.tolist(), paged_kv_indptr.tolist()
        assert len(paged_kv_indices) == ends[-1] and q_data_type == kv_data_type == torch.bfloat16
        last = paged_kv_last_page_len.tolist()
        assert all(1 <= number <= page_size for number in last)
        counts = paged_kv_indptr.diff().tolist()
        lens = [(count - 1) * page_size + number for count, number in zip(counts, last, strict=True)]
        how = {"scale": sm_scale, "window": (window_left, 0), "cap": logits_soft_cap or 0.0}
        self.given = paged_kv_indices.split(counts), starts, lens
        self.how = how

    def run(self, q, paged_kv_cache):
        type(self).calls += 1
        return over_pages(q, *paged_kv_cache.unbind(1), *self.given, **self.how)


@pytest.fixture
def installed(monkeypatch):
    """All three modules, on a GPU that is the CPU."""

    def put(name, holder, names):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for attribute in names:
            setattr(module, attribute, getattr(holder, attribute))
        monkeypatch.setitem(sys.modules, name, module)

    put("flash_attn", FlashAttention, ["flash_attn_varlen_func"])
    put("flash_attn_interface", FlashAttention, ["flash_attn_with_kvcache"])
    put("flashinfer", sys.modules[__name__], ["BatchPrefillWithPagedKVCacheWrapper"])
    monkeypatch.setattr(library.LibraryBackend, "cannot_serve", staticmethod(lambda spec, platform: None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


class Here(Platform):
    """The references on a CPU, in bfloat16."""

    def __init__(self):
        super().__init__(torch.device("cpu"), ref_table())

    def available_memory_bytes(self, share):
        return 0

    def compute_dtype(self, dtype):
        return dtype


def step(lens, block_size=64):
    paged = make_paged(lens, heads=8, kv_heads=2, head_dim=64, block_size=block_size, dtype=torch.bfloat16)
    batch = ForwardBatch(
        input_ids=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, dtype=torch.int64),
        cu_q_lens=paged.cu_q_lens,
        kv_lens=paged.kv_lens,
        longest_q=max(new for new, _ in lens),
        kv_caches=[paged.cache],
        groups=[GroupTables(paged.block_tables, paged.block_tables)],
        group_of_layer=[0],
    )
    return paged.q.bfloat16(), paged.cache, batch


DECODE, PROMPTS = [(1, 70), (1, 1), (1, 300)], [(1, 70), (40, 40), (16, 97), (7, 64)]
WAYS = [Scores(0.125), Scores(0.125, sliding_window=20), Scores(0.125, soft_cap=5.0)]


def backend_of(name, monkeypatch):
    if name == "flash_attn 2":
        monkeypatch.setattr(flash_attention, "_is_hopper", lambda platform: False)
    return choose_backend([SPEC], Here(), name.split()[0].upper())


@pytest.mark.parametrize("scores", WAYS, ids=["plain", "window", "cap"])
@pytest.mark.parametrize("name", ["flash_attn 3", "flash_attn 2", "flashinfer"])
def test_what_the_library_computes_is_attention(name, scores, installed, monkeypatch):
    """Within bfloat16's rounding of the reference; with other lengths, far from it."""
    backend = backend_of(name, monkeypatch)
    fake = BatchPrefillWithPagedKVCacheWrapper if name == "flashinfer" else FlashAttention
    for lens in (DECODE, PROMPTS):
        q, cache, batch = step(lens, 256 if name.endswith("2") else 64)
        calls = fake.calls
        backend.plan(batch)
        made = backend.attend(q, cache, batch.groups[0], batch, scores)
        is_asked = name != "flashinfer" or lens is PROMPTS
        assert fake.calls - calls == is_asked
        expected = PagedBackend(Here()).attend(q, cache, batch.groups[0], batch, scores)
        assert (made.float() - expected.float()).norm() < 0.01 * expected.float().norm()
        batch.kv_lens = batch.kv_lens.clone()
        batch.kv_lens[0] -= 30
        backend.plan(batch)
        other = backend.attend(q, cache, batch.groups[0], batch, scores)
        assert (other.float() - expected.float())[: int(batch.cu_q_lens[1])].norm() > 0.01


def test_what_a_library_does_not_do_stays_with_the_other(installed, monkeypatch):
    backend = backend_of("flash_attn 3", monkeypatch)
    q, cache, batch = step(PROMPTS)
    calls = FlashAttention.calls
    for scores in (Scores(0.125, is_causal=False), Scores(0.125, sinks=torch.zeros(8))):
        made = backend.attend(q, cache, batch.groups[0], batch, scores)
        assert torch.equal(made, PagedBackend(Here()).attend(q, cache, batch.groups[0], batch, scores))
    batch.longest_q = 0  # a captured step, repeated for other requests
    backend_of("flash_attn 3", monkeypatch).attend(q, cache, batch.groups[0], batch, WAYS[0])
    assert FlashAttention.calls == calls


@pytest.mark.parametrize(
    ("library_ms", "kinds"),
    [({"decode": 1, "prompt": 1}, {"decode", "prompt"}), ({"decode": 3, "prompt": 1}, {"prompt"}),
     ({"decode": 3, "prompt": 3}, None), ({"decode": 1.98, "prompt": 3}, None)],
)  # fmt: skip
def test_a_library_is_used_for_what_it_is_faster_at(library_ms, kinds, installed, monkeypatch, caplog):
    """Octavo's own take 2 ms."""
    monkeypatch.setattr(library, "SHAPES", {"decode": ((2, 1, 64),), "prompt": ((1, 64, 64),)})
    asked = []

    def milliseconds(work):
        calls = FlashAttention.calls
        asked.append(work().shape[0])
        kind = "decode" if asked[-1] == 2 else "prompt"
        return library_ms[kind] if FlashAttention.calls > calls else 2

    monkeypatch.setattr(library, "_milliseconds", milliseconds)
    monkeypatch.setattr(library, "_wall_milliseconds", lambda work, device: 0.0)
    monkeypatch.setattr(FlashInferBackend, "supports", staticmethod(lambda spec, platform: "not here"))
    with caplog.at_level("DEBUG"):
        chosen = choose_backend([SPEC], Here(), num_heads=8)
    if kinds is None:
        assert type(chosen) is PagedBackend
    else:
        assert isinstance(chosen, FlashAttentionBackend) and chosen.kinds == kinds
    assert "flash_attn: decode" in caplog.text and "times as fast as PagedBackend" in caplog.text
    assert "flashinfer: not here" in caplog.text


@pytest.mark.parametrize(("layers", "name"), [(1, "PagedBackend"), (100, "FlashInferBackend")])
def test_a_plan_on_the_host_counts_once_for_all_layers(layers, name, installed, monkeypatch):
    """FlashInfer takes half the time and plans for 40 ms."""
    monkeypatch.setattr(library, "SHAPES", {"decode": (), "prompt": ((1, 64, 64),)})
    monkeypatch.setattr(library, "_milliseconds", lambda work: 1 if made(work) else 2)
    monkeypatch.setattr(library, "_wall_milliseconds", lambda work, device: next(walls))
    monkeypatch.setattr(FlashAttentionBackend, "supports", staticmethod(lambda spec, platform: "not here"))
    monkeypatch.setattr(FlashInferBackend, "why_not_tried", staticmethod(lambda: ""))
    fake, walls = BatchPrefillWithPagedKVCacheWrapper, iter((41.0, 1.0))

    def made(work):
        calls = fake.calls
        work()
        return fake.calls > calls

    chosen = choose_backend([SPEC] * layers, Here(), num_heads=8)
    assert type(chosen).__name__ == name


def test_a_library_that_fails_is_left_alone(installed, monkeypatch, caplog):
    def fail(self, spec, heads, layers):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(FlashAttentionBackend, "measure", fail)
    monkeypatch.setattr(FlashInferBackend, "measure", fail)
    assert type(choose_backend([SPEC], Here(), num_heads=8)) is PagedBackend
    assert "The attention back end flash_attn fails: no kernel image" in caplog.text


def test_blocks_of_a_wrong_size_are_refused(installed, monkeypatch):
    """Named: an error; else another one is used, and the log says why."""
    backend = backend_of("flash_attn 2", monkeypatch)
    q, cache, batch = step(PROMPTS)
    with pytest.raises(
        Unsupported, match="version 2 takes blocks of 256 slots, or several times as many, not"
    ):
        backend.attend(q, cache, batch.groups[0], batch, WAYS[0])
    assert type(choose_backend([SPEC], Here(), num_heads=8)) is PagedBackend


def test_nothing_is_compiled_at_a_start_unasked(installed, caplog, monkeypatch):
    monkeypatch.setattr(FlashAttentionBackend, "supports", staticmethod(lambda spec, platform: "not here"))
    with caplog.at_level("DEBUG"):
        assert type(choose_backend([SPEC], Here(), num_heads=8)) is PagedBackend
    assert "flashinfer: its kernels would have to be compiled" in caplog.text


def test_reasons(monkeypatch):
    gpu = Here()
    with pytest.raises(Unsupported, match="flash_attn: it needs a GPU"):
        choose_backend([SPEC], gpu, "flash_attn")
    gpu.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    for name, spec, reason in (
        ("flash_attn", SPEC, "it needs an NVIDIA GPU of compute capability 8.0 or more"),
        ("flashinfer", SPEC, "the package flashinfer-python is not installed"),
        ("flashinfer", LatentKV(64, "bfloat16", 128), "it keeps no latent vectors and no states"),
        ("flashinfer", HeadsKV(2, 64, "float32", 1024), "it takes a KV cache of 16 bits"),
    ):
        with pytest.raises(Unsupported, match=f"{name}: {reason}"):
            choose_backend([spec], gpu, name)
