"""Prefill by cuDNN against the Triton kernels, bf16: fresh and cached prompts beside decoding requests."""

import pytest
import torch

from octavo.messages.kv import HeadsKV
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.attention.registry import choose_backend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import Scores
from octavo.runtime.platforms.platform import get_platform
from tests.kernel_cases import make_paged

pytestmark = pytest.mark.gpu
pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(32, 128, 64), (16, 128, 16), (6, 64, 64)])
def test_long_steps(heads, head_dim, block_size):
    lens = [(1, 77), (1, 300), (1500, 1500), (17, 40), (2, 2), (700, 1300), (1, 900), (64, 64)]
    paged = make_paged(
        lens, heads=heads, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16
    ).to("cuda")
    q, cache = paged.q, paged.cache
    batch = ForwardBatch(
        input_ids=torch.zeros(len(q), dtype=torch.int64, device="cuda"),
        positions=torch.zeros(len(q), dtype=torch.int64, device="cuda"),
        cu_q_lens=paged.cu_q_lens,
        kv_lens=paged.kv_lens,
        kv_caches=[cache],
        groups=[GroupTables(paged.block_tables, torch.zeros(len(q), dtype=torch.int64, device="cuda"))],
        group_of_layer=[0],
        num_singles=2,
        longest_q=1500,
    )
    platform = get_platform("cuda", 1)
    backend = choose_backend([HeadsKV(2, head_dim, "bfloat16", 2 * 2 * head_dim * 2)], platform)
    assert type(backend).__name__ == "CuDNNBackend"
    scores = Scores(head_dim**-0.5)
    backend.plan(batch)
    q = q.bfloat16()
    found = [backend.attend(q, cache, batch.groups[0], batch, scores).float()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.append(backend.attend(q, cache, batch.groups[0], batch, scores).float())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = PagedBackend(platform).attend(q, cache, batch.groups[0], batch, scores).float()
    assert len(backend._of_step) == 1, "cuDNN was not asked"
    assert torch.equal(*found)
    assert (found[0] - expected).norm() <= 5e-3 * expected.norm()
