"""FlashAttention and FlashInfer, where installed, against octavo's kernels: attention, and a model."""

import re
from importlib.util import find_spec

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.messages.kv import HeadsKV
from octavo.runtime.attention.flashinfer import FlashInferBackend
from octavo.runtime.attention.library import LibraryBackend
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.attention.registry import BACKENDS, choose_backend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import Scores
from octavo.runtime.platforms.platform import get_platform
from tests.kernel_cases import make_paged
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the libraries' own imports
PACKAGES = {"flash_attn": ("flash_attn_interface", "flash_attn"), "flashinfer": ("flashinfer",)}
PROMPTS, DECODE = [(40, 40), (16, 97), (1, 70), (700, 1300)], [(1, 70), (1, 1), (1, 900)]


@pytest.fixture(params=PACKAGES)
def name(request):
    if not any(map(find_spec, PACKAGES[request.param])):
        pytest.skip(f"needs the package of {PACKAGES[request.param][0]}")
    return request.param


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (8, 4, 256), (64, 8, 64)])
def test_attention(name, heads, kv_heads, size):
    """Within bfloat16's rounding; with one key less, beyond it."""
    platform = get_platform("cuda", 1)
    made = choose_backend([HeadsKV(kv_heads, size, "bfloat16", 4 * kv_heads * size)], platform, name)
    for lens in (PROMPTS, DECODE) if "decode" in made.kinds else (PROMPTS,):
        paged = make_paged(
            lens, heads=heads, kv_heads=kv_heads, head_dim=size, block_size=64, dtype=torch.bfloat16
        ).to("cuda")
        q, results = paged.q.bfloat16(), []
        for fewer in (0, 1):
            batch = ForwardBatch(
                input_ids=q,
                positions=q,
                cu_q_lens=paged.cu_q_lens,
                kv_lens=paged.kv_lens - fewer * (paged.kv_lens > 60).int(),
                longest_q=max(new for new, _ in lens),
                kv_caches=[paged.cache],
                groups=[GroupTables(paged.block_tables, paged.block_tables)],
                group_of_layer=[0],
            )
            made.plan(batch)
            given = q, paged.cache, paged.block_tables, batch, Scores(size**-0.5)
            results.append(made.attend_by_library(*given).float())
            if not fewer:
                own = PagedBackend(platform).attend(q, paged.cache, batch.groups[0], batch, given[-1]).float()
        right, wrong = ((result - own).norm() / own.norm() for result in results)
        assert right < 6e-3 < 2e-2 < wrong


def counted(attend, calls):
    return lambda *arguments: calls.append(1) or attend(*arguments)


def test_a_models_tokens(name, tmp_path, monkeypatch):
    """Prompts' log probabilities are those of octavo's kernels, and so are tokens until two are as likely."""
    folder = save(make_oracle(tiny_config("LlamaForCausalLM") | {"head_dim": 64}), tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(60, (90, 7, 33, 64))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    calls, outputs = [], {}
    for backend in ("paged", name):
        kind = type(choose_backend([HeadsKV(2, 64, "bfloat16", 512)], get_platform("cuda", 1), backend))
        if issubclass(kind, LibraryBackend):
            monkeypatch.setattr(kind, "attend_by_library", counted(kind.attend_by_library, calls))
        llm = LLM(
            str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=128,
            attention_backend=backend,
            gpu_memory_utilization=0.1,
        )
        outputs[backend] = llm.generate(prompts, params, use_tqdm=False)
        llm.shutdown()
    assert calls, "the library was not asked"
    for own, other in zip(*outputs.values(), strict=True):
        for a, b in zip(own.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert abs(next(iter(a.values())).logprob - next(iter(b.values())).logprob) < 0.2
        ours, theirs = own.outputs[0], other.outputs[0]
        for at, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            if pair[0] != pair[1]:
                second, first = sorted(found.logprob for found in ours.logprobs[at].values())[-2:]
                assert first - second < 0.1
                break


def test_a_start_chooses_by_what_it_measures(name, caplog, monkeypatch):
    """A library does the kinds of steps in which it was faster by the log, and no others."""
    monkeypatch.setattr(FlashInferBackend, "why_not_tried", staticmethod(lambda: ""))
    with caplog.at_level("INFO"):
        chosen = choose_backend(
            [HeadsKV(8, 64, "bfloat16", 2048)] * 32, get_platform("cuda", 1), num_heads=64
        )
    kinds, told = frozenset(), re.search(rf"{name}: (.*?) times as fast as", caplog.text)[1]
    while isinstance(chosen, LibraryBackend):
        kinds = chosen.kinds if type(chosen) is BACKENDS.load(name) else kinds
        chosen = chosen._other
    gains = {kind: float(a) * float(b) for kind, a, b in re.findall(r"(\w+) ([\d.]+) and ([\d.]+)", told)}
    assert set(gains) == BACKENDS.load(name).kinds
    assert kinds <= {kind for kind, gain in gains.items() if gain > 1.02**2}
    assert kinds >= {kind for kind, gain in gains.items() if gain > 1.04**2}
