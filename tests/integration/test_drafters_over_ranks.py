"""Drafters with weights over two ranks and two stages: the tokens and logprobs of plain decoding, to the bit.

The heads are trained here, so that many guesses come true and many do not. On one rank the same drafters are
those of tests/integration/test_state_drafters.py.
"""

from functools import cache

import pytest
import torch
from torch.nn import functional

from octavo import LLM, SamplingParams
from tests.integration import test_dflash as dflash
from tests.integration import test_draft_heads as heads
from tests.integration import test_state_drafters as states
from tests.integration.test_speculation import drafted
from tests.integration.test_state_drafters import (
    COUNT,
    VOCAB,
    every_guess_is_tried,  # noqa: F401  # a fixture of all tests here
)
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.slow
COMMON = {"max_model_len": 128, "num_gpu_blocks_override": 400, "skip_tokenizer_init": True} | states.EXACT
RANKS = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "cpu_threads": 1}
PROMPTS = [
    {"prompt_token_ids": ids} for ids in [*states.PROMPTS[:8], [(11 * i + 3) % 127 for i in range(45)]]
]
PARAMS = [
    SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False, logprobs=2, seed=number, **wanted)
    for number, wanted in enumerate(
        [
            *({"temperature": 0} for _ in range(4)),
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.0, "n": 2},
            {"temperature": 0, "repetition_penalty": 1.2},
            {"temperature": 0, "min_tokens": 20, "stop_token_ids": [60, 54]},
            {"temperature": 0, "prompt_logprobs": 1},
        ]
    )
]
CHUNKED = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, "max_num_seqs": 12}
CAPTURED = {"distributed_executor_backend": "tests.replaying_ranks:ReplayingExecutor"}


def answers(llm):
    """What was chosen and how likely it was; twice, the second time from the cache."""
    outputs = [out for _ in range(2) for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [([(c.token_ids, c.logprobs) for c in out.outputs], out.prompt_logprobs) for out in outputs]


def texts_of(path):
    """Greedy texts to train with: [8, T]."""
    wanted = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    with LLM(path, **COMMON) as llm:
        outputs = llm.generate(PROMPTS[:8], wanted, use_tqdm=False)
    return [
        [*prompt["prompt_token_ids"], *out.outputs[0].token_ids]
        for prompt, out in zip(PROMPTS[:8], outputs, strict=True)
    ]


def minimise(loss_of, weights, length, epochs):
    """Train to guess from every beginning of texts: `loss_of` is asked for each number of known tokens."""
    optimizer = torch.optim.Adam([w.requires_grad_() for w in weights if w.is_floating_point()], 0.01)
    for _ in range(epochs):
        for known in range(6, length - COUNT):
            optimizer.zero_grad()
            loss_of(known).backward()
            optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)


def train_dflash(oracle, texts):
    weights, ids = dflash.make_weights("release"), torch.tensor(texts).unique()
    head, place = oracle.lm_head.weight.detach()[ids], {number: i for i, number in enumerate(ids.tolist())}

    def loss_of(known):
        text = texts[known % len(texts)]
        logits = dflash.states_of_masks(weights, oracle, text[:known], COUNT) @ head.T
        return functional.cross_entropy(logits, torch.tensor([place[i] for i in text[known : known + COUNT]]))

    minimise(loss_of, [*weights.values()], len(texts[0]), 20)
    return weights


def train_mtp(oracle, mtp, texts):
    texts = torch.tensor(texts)
    with torch.no_grad():
        hidden = oracle.model(texts).last_hidden_state

    def loss_of(known):
        places = torch.arange(1, known)[None].expand(len(texts), -1)
        ids = texts[:, 1:known]
        out = mtp.forward_layer(0, hidden[:, : known - 1], places, None, input_ids=ids)
        return functional.cross_entropy(oracle.lm_head(out[:, -1]), texts[:, known])

    minimise(loss_of, [*mtp.layers.parameters()], texts.shape[1], 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(oracle, path)"""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"vocab_size": VOCAB, "num_hidden_layers": 4})
    return oracle, str(save(oracle, tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def folders(llama, tmp_path_factory):
    """Trained heads, by method."""
    (oracle, path), root = llama, tmp_path_factory.mktemp("heads")
    texts = texts_of(path)
    made = {
        method: (config, heads.train("medusa" if method == "medusa" else "mlp", oracle, texts))
        for method, config in heads.CONFIGS.items()
    }
    for method in ("eagle", "eagle3"):
        config = states.KINDS[method][0]
        made[method] = config, states.train(method, oracle, texts, VOCAB, states.DRAFT_VOCAB)
    made["dflash"] = dflash.RELEASE, train_dflash(oracle, texts)
    return {method: states.write(root / method, *head) for method, head in made.items()}


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory):
    """Paths of models with a trained and a random layer, by architecture."""
    root = tmp_path_factory.mktemp("models")
    oracle = make_oracle(tiny_config("DeepseekV3ForCausalLM") | {"num_nextn_predict_layers": 1})
    path, mtp = save(oracle, root / "deepseek"), states.make_mtp(oracle)
    train_mtp(oracle, mtp, texts_of(str(path)))
    states.store_mtp(mtp, path, oracle.config.num_hidden_layers)
    recurrent = make_oracle(tiny_config("Qwen3NextForCausalLM"))
    return {"deepseek": str(path), "qwen": states.save_with_mtp(recurrent, root / "qwen")[0]}


@pytest.fixture(scope="module")
def expected():
    """Give what plain decoding over the ranks answers; its tokens are those of one device."""

    @cache
    def of(path):
        with LLM(path, **COMMON, cpu_threads=1) as llm:
            alone = answers(llm)
        with LLM(path, **COMMON, **RANKS) as llm:
            plain = answers(llm)
        assert len({str([[choice[0] for choice in out[0]] for out in run]) for run in (alone, plain)}) == 1
        return plain

    return of


def check(path, config, options, expected, num_true):
    config |= {"num_speculative_tokens": COUNT}
    plain = expected(path)
    with LLM(path, **COMMON | RANKS | options, speculative_config=config) as llm:
        assert answers(llm) == plain
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > 200 and num_guessed > num_accepted >= num_true


WAYS = pytest.mark.parametrize("options", [{}, CHUNKED, CAPTURED], ids=["", "chunked", "captured"])


@WAYS
@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash", "medusa", "mlp_speculator"])
def test_heads(llama, folders, expected, method, options):
    check(llama[1], {"method": method, "model": folders[method]}, options, expected, 20)


@WAYS
@pytest.mark.parametrize(("model", "num_true"), [("deepseek", 20), ("qwen", 0)])
def test_mtp(with_mtp, expected, model, num_true, options):
    check(with_mtp[model], {"method": "mtp"}, options, expected, num_true)
