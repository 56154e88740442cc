"""Parts of a request's keys on several ranks, merged by their sums, are attention to all of them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.messages.kv import HeadsKV
from octavo.runtime.attention import shared_context
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.attention.shared_context import SharedContext, merge_parts
from octavo.runtime.batch import ForwardBatch, GroupTables, MutualSpans
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Ragged, Rotation, Scores, Share
from octavo.runtime.kernels.cache_layout import CacheLayout, make_latent_spec
from octavo.runtime.kernels.ref.cache import paged_attention as reference
from octavo.runtime.platforms.platform import get_platform
from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.triton.table import cuda_table

BLOCK, RANKS, RUN = 16, 3, 4
ATTEND = {"references": reference, "triton": cuda_table().attention.paged_attention}
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]


def counts(num_tokens, rank):
    """How many of the first tokens a rank has."""
    rounds, rest = num_tokens // (RUN * RANKS), num_tokens % (RUN * RANKS)
    return (rounds * RUN + (rest - rank * RUN).clamp(0, RUN)).int()


def batch_of(requests):
    """requests: (cached tokens, new ones)"""
    new = torch.tensor([n for _, n in requests])
    cu = torch.tensor([0, *new.cumsum(0)], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([a + b for a, b in requests], dtype=torch.int32, device=DEVICE)
    seen = torch.cat([torch.arange(a + 1, a + b + 1) for a, b in requests]).to(DEVICE)
    singles = next((i for i, (_, n) in enumerate(requests) if n > 1), len(requests))
    return cu, lens, seen, singles


def caches(tokens, widest, shape, dtype):
    """One with all tokens and one per rank, whose blocks have the same numbers."""
    width = -(-widest // (BLOCK * RANKS))
    tables = torch.randperm(len(tokens) * width).view(-1, width).int() + 1
    whole = torch.full((tables.numel() * RANKS + RANKS, shape[0], BLOCK, *shape[1:]), torch.nan, dtype=dtype)
    parts = torch.full((RANKS, tables.numel() + 1, shape[0], BLOCK, *shape[1:]), torch.nan, dtype=dtype)
    for request, known in enumerate(tokens):
        for place, token in enumerate(known):
            block, at = divmod(place, BLOCK * RANKS)
            number = int(tables[request, block])
            whole[number * RANKS + at // BLOCK, :, at % BLOCK] = token
            turn = at // RUN
            parts[turn % RANKS, number, :, turn // RANKS * RUN + at % RUN] = token
    wide = (tables[:, :, None] * RANKS + torch.arange(RANKS)).flatten(1).int()
    return whole.to(DEVICE), wide.to(DEVICE), parts.to(DEVICE), tables.to(DEVICE)


def merged(results, sums, *, weighted=True):
    weights = torch.stack(sums).softmax(0) if weighted else torch.full((RANKS, *sums[0].shape), 1 / RANKS)
    return (torch.stack(results).float() * weights.nan_to_num(0.0).to(DEVICE)[..., None]).sum(0)


def attended(requests, kind, dtype, attend, group=3, size=32):
    """(of all keys, of each rank's, their sums)"""
    torch.manual_seed(1)
    cu, lens, seen, singles = batch_of(requests)
    shape = (1, 1, size + 8) if kind == "latent" else (2, 1, size)
    drawn = torch.randn(len(requests), int(lens.max()), *shape).to(dtype)
    tokens = [known[: int(length)] for known, length in zip(drawn, lens, strict=True)]
    whole, wide, parts, tables = caches(tokens, int(lens.max()), shape, dtype)
    q = torch.randn(int(cu[-1]), group, shape[-1], device=DEVICE, dtype=dtype)
    scores = Scores(0.3, soft_cap=5.0 if kind == "capped" else 0.0, keys_only=8 if kind == "latent" else 0)
    expected = reference(q, whole, wide, Ragged(cu_q_lens=cu, kv_lens=lens), scores).float()
    results, sums = [], []
    for rank in range(RANKS):
        share = Share(counts(seen, rank), torch.empty(q.shape[:2], device=DEVICE))
        keys = Ragged(cu_q_lens=cu, kv_lens=counts(lens, rank), num_singles=singles)
        keys.common_start = kind == "prefix"
        results.append(attend(q, parts[rank], tables, keys, scores, share)[..., scores.keys_only :])
        sums.append(share.log_sums)
    return expected[..., scores.keys_only :], results, sums


KINDS = ["heads", "capped", "latent", "prefix"]
REQUESTS = {"decode": ((0, 1), (200, 1), (6, 1)), "mixed": ((77, 1), (0, 40), (3, 2), (90, 33))}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: logarithms of 0
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_parts_make_the_whole(requests, kind, name, dtype):
    expected, results, sums = attended(REQUESTS[requests], kind, dtype, ATTEND[name])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(merged(results, sums), expected, atol=tolerance, rtol=tolerance)
    wrong = merged(results, sums, weighted=False)
    assert (wrong - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_are_merged_by_a_kernel(has_sinks):
    """Parts and sums as they lie in one message; a token that nobody has seen anything of becomes 0."""
    message = torch.randn(2, 3, 5, 9, device=DEVICE)
    parts, sums = message[..., :8], message[..., 8]
    sums[0, 1], sums[:, 2] = float("-inf"), float("-inf")
    sinks = torch.randn(5, device=DEVICE) if has_sinks else None
    made = cuda_table().attention.merge_parts(parts, sums, sinks)
    torch.testing.assert_close(made, merge_parts(parts, sums, sinks))
    assert made[2].eq(0).all() and made[:2].ne(0).all()


class _Ranks:
    """A group of threads."""

    peers, process_group = None, "threads"

    def __init__(self, rank, size, meeting, told):
        self.rank, self.size, self._meeting, self._told = rank, size, meeting, told

    def _exchange(self, x):
        self._told[self.rank] = x
        self._meeting.wait()
        found = list(self._told)
        self._meeting.wait()
        return found

    def all_gather(self, x):
        return torch.cat(self._exchange(x), 1)

    def all_to_all(self, x):
        return torch.cat([part.chunk(self.size)[self.rank] for part in self._exchange(x)])


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_divided_cache_is_a_whole_one(interleave, is_broken, monkeypatch):
    """With sinks, tokens that see each other and padding; not without the weights by which parts count."""
    torch.manual_seed(2)
    monkeypatch.setenv("OCTAVO_NO_CPU_KERNELS", "1")
    platform, spec = get_platform("cpu", 1), HeadsKV(1, 8, "float32", 64)
    q, k, v = torch.randn(2, 26, 4, 8), torch.randn(26, 1, 8), torch.randn(26, 1, 8)
    sinks = torch.randn(2, 4)
    cu = torch.tensor([0, 1, 24, 26], dtype=torch.int32)
    mutual = MutualSpans(
        torch.arange(5, 12),
        torch.tensor([1]),
        Ragged(cu_q_lens=torch.tensor([0, 7]), kv_lens=torch.tensor([11]).int()),
    )
    slots = torch.tensor([40, *range(8, 31), -1, -1])

    def batch(tables):
        return ForwardBatch(
            cu_q_lens=cu, kv_lens=torch.tensor([1, 23, 0]).int(), input_ids=slots, positions=slots,
            kv_caches=[], groups=[tables], group_of_layer=[0], mutual=mutual,
        )  # fmt: skip

    def run(backend, rank, block_size):
        tables = GroupTables(
            torch.tensor([[5, 0, 0], [1, 2, 3], [0, 0, 0]], dtype=torch.int32), slots.clone()
        )
        cache = CacheLayout(spec, block_size).zeros(6, torch.device("cpu"))
        new, scores = HeadInputs(q[rank].clone(), k.clone(), v), Scores(0.4, sinks=sinks[rank])
        return backend.run(new, cache, tables, batch(tables), scores)[:24]

    if is_broken:
        monkeypatch.setattr(shared_context, "merge_parts", lambda parts, sums, sinks: parts.mean(0))
    meeting, told = threading.Barrier(2), [None, None]
    ranks = [SharedContext(platform, "float32", _Ranks(r, 2, meeting, told), interleave) for r in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, ranks, range(2), [4, 4]))
    monkeypatch.undo()
    for rank, part in enumerate(found):
        whole = run(PagedBackend(platform), rank, 8)
        assert torch.allclose(part, whole, atol=1e-5) != is_broken


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("is_broken", [False, True])
def test_every_rank_has_the_latents_of_a_step(interleave, is_broken, monkeypatch):
    """Of which it keeps its own, to which later tokens attend; what it keeps is not enough for a prompt."""
    torch.manual_seed(3)
    platform, spec = get_platform("cpu", 1), make_latent_spec(24, torch.float32)
    q, latent = torch.randn(2, 24, 4, 24), torch.randn(24, 1, 24)
    angles = torch.randn(24, 4)
    rotation, norms = Rotation(angles.cos(), angles.sin(), False), HeadNorms(None, torch.rand(16) + 0.5, 1e-5)

    def step(start, end):
        slots = torch.arange(8 + start, 8 + end)
        tables = GroupTables(torch.tensor([[1, 2, 3]], dtype=torch.int32), slots)
        lens = {"cu_q_lens": torch.tensor([0, end - start]).int(), "kv_lens": torch.tensor([end]).int()}
        ids = {"input_ids": slots, "positions": slots, "kv_caches": [], "groups": [tables]}
        return tables, ForwardBatch(**lens, **ids, group_of_layer=[0])

    def run(backend, rank, block_size):
        cache = CacheLayout(spec, block_size).zeros(6, torch.device("cpu"))
        found = []
        for start, end in ((0, 23), (23, 24)):
            turn = Rotation(rotation.cos[start:end], rotation.sin[start:end], False)
            new = HeadInputs(q[rank, start:end].clone(), *[latent[start:end].clone()] * 2, turn, norms)
            tables, batch = step(start, end)
            found += backend.store(new, cache, tables, batch)
        return [*found, backend.attend_singles(found[2], cache, tables, batch, Scores(0.4, keys_only=8))]

    if is_broken:

        def store(self, new, cache, tables, batch):
            own = self.slots(tables, cache, batch)
            made = platform.kernels.attention.store_kv(new, cache, own)
            return made, cache.view(-1, cache.shape[-1])[own]

        monkeypatch.setattr(SharedContext, "store", store)
    meeting, told = threading.Barrier(2), [None, None]
    ranks = [SharedContext(platform, "float32", _Ranks(r, 2, meeting, told), interleave) for r in range(2)]
    with ThreadPoolExecutor(2) as threads:
        every = list(threads.map(run, ranks, range(2), [4, 4]))
    for rank, found in enumerate(every):
        queries, stored, _, _, seen = run(PagedBackend(platform), rank, 8)
        torch.testing.assert_close(found[0], queries)
        assert torch.allclose(found[1], stored) != is_broken
        torch.testing.assert_close(found[4][..., 8:], seen[..., 8:])
