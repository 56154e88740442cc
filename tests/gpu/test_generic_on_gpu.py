"""Models by transformers' code over the paged cache of a GPU, against transformers alone on CPU."""

import copy

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.runtime.models.generic import Generic
from tests.model_driver import greedy, load, prompt_logits
from tests.parity.test_generic_models import CONFIGS, NUM_TOKENS, VOCAB_SIZE
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, oracle_logits, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """The oracle of one model, and its checkpoint."""
    oracle = make_oracle(CONFIGS[request.param])
    oracle.set_attn_implementation("eager")  # the others know no soft cap
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


def test_generic_models_on_gpu(pair):
    oracle, folder = pair
    model = load(folder, device="cuda", model_impl="transformers")
    assert isinstance(model, Generic)
    prompts = make_prompts(VOCAB_SIZE)
    for chunk in (0, 13):
        for logits, prompt in zip(prompt_logits(model, prompts, chunk), prompts, strict=True):
            torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
    for prompt, output in zip(prompts, greedy(model, prompts, NUM_TOKENS), strict=True):
        assert output == oracle_greedy(oracle, prompt, output)


def test_generic_bf16_on_gpu(pair):
    """As close to float32 as transformers' own bf16 arithmetic on the same weights is, or nearly."""
    oracle, folder = pair
    [prompt] = make_prompts(VOCAB_SIZE, (40,))
    exact = oracle_logits(oracle, prompt)
    rounded = oracle_logits(copy.deepcopy(oracle).bfloat16(), prompt)
    model = load(folder, device="cuda", model_impl="transformers", dtype="bfloat16")
    ours = prompt_logits(model, [prompt])[0].float()
    spread = (rounded - exact).norm() / exact.norm()
    assert (ours - exact).norm() / exact.norm() <= 1.5 * spread + 1e-3


def test_generic_model_through_the_engine(tmp_path):
    """Two steps in flight, chunked prompts, prefix hits: the greedy tokens of transformers."""
    oracle = make_oracle(CONFIGS["exaone"])
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 200}
    prompts = make_prompts(VOCAB_SIZE)
    wanted = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(save(oracle, tmp_path)), max_num_seqs=3, max_num_batched_tokens=32, **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, wanted, use_tqdm=False), strict=True):
                tokens = list(output.outputs[0].token_ids)
                assert tokens == oracle_greedy(oracle, prompt, tokens)
