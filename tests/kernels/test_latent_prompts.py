"""The plain form of latent attention against torch's, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch.nn import functional

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.attention import PlainPrompts
from octavo.runtime.kernels.triton.table import cuda_table

ATTEND = cuda_table().attention.latent_prompts
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]


def make(lens, heads, sizes, dtype):
    """Tensors as the layer has them: parts of wider ones, and counts that begin anywhere."""
    torch.manual_seed(heads)
    plain, rope, value = sizes
    tokens = sum(lens)

    def draw(*shape):
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    starts = 7 + torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
    latents = draw(tokens, rope + 16)
    q, q_rope = draw(tokens, heads, plain + rope), draw(tokens, heads, rope + 16)[..., :rope]
    made = draw(tokens, heads, plain + value)
    return PlainPrompts(q, q_rope, made, latents[:, :rope], starts, (plain + rope) ** -0.5)


def expected(prompts, *, is_causal=True):
    """Each request alone, in float32."""
    plain = prompts.q.shape[2] - prompts.k_rope.shape[1]
    outputs = []
    for begin, end in (prompts.cu_q_lens - prompts.cu_q_lens[0]).unfold(0, 2, 1).tolist():
        part = slice(begin, end)
        q = torch.cat([prompts.q[part, :, :plain], prompts.q_rope[part]], -1)
        made, rope = prompts.made[part], prompts.k_rope[part, None].expand(-1, q.shape[1], -1)
        given = q, torch.cat([made[..., :plain], rope], -1), made[..., plain:]
        q, k, v = (tensor.float().transpose(0, 1) for tensor in given)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=prompts.scale)
        outputs.append(seen.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lens", "heads", "sizes"),
    [((5, 70, 1, 33), 4, (16, 8, 24)), ((64, 65), 3, (128, 64, 128)), ((200,), 1, (32, 32, 64))],
)
def test_prompts(lens, heads, sizes, dtype):
    """Within rounding; far from what sees later tokens, too."""
    prompts = make(lens, heads, sizes, dtype)
    out = torch.full((sum(lens), heads, sizes[2]), torch.nan, device=DEVICE, dtype=dtype)
    ATTEND(prompts, out)
    right, wrong = expected(prompts), expected(prompts, is_causal=False)
    assert (out.float() - right).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * right.norm()
    assert (out.float() - wrong).norm() > 0.1 * right.norm()
