"""Medusa heads and MLP speculators, trained here in seconds: they guess well, and change no text."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.workers_drafting import WorkersDrafting
from octavo.metrics import Counter
from octavo.runtime.speculative.heads import MedusaHeads
from tests.integration.test_speculation import drafted, results
from tests.tiny_models import make_oracle, save, tiny_config

VOCAB, SIZE, INNER, COUNT = 49152, 48, 64, 3
COMMON = {"max_model_len": 128, "num_gpu_blocks_override": 400, "dtype": "float32"}
PROMPTS = [[7 * i + j for j in range(5)] for i in range(24)]
GREEDY = SamplingParams(max_tokens=32, temperature=0)


@pytest.fixture(autouse=True)
def every_guess_is_tried(monkeypatch):
    """As if guessing and verifying cost nothing."""
    monkeypatch.setattr(StepCosts, "of", lambda costs, rows, more: np.ones(more + 1))
    monkeypatch.setattr(WorkersDrafting, "_best_count", lambda drafting, rows: drafting._wanted.most)


def medusa(weights, number, hidden, token_ids):
    """(logits, state) of a guess, as the paper has them."""
    block = f"blocks.{number}.layers.0"
    x = hidden + functional.silu(hidden @ weights[f"{block}.weight"].T + weights[f"{block}.bias"])
    return x @ weights[f"lm_heads.{number}.weight"].T, hidden


def mlp(weights, number, hidden, token_ids):
    kept = 0.5 ** (0.5 / COUNT)
    state = hidden @ weights[f"proj.{number}.weight"].T
    state = torch.add(
        state, weights[f"emb.{number}.weight"][token_ids], alpha=((1 - kept**2) * INNER / 2) ** 0.5 / kept
    )
    state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)
    state = functional.gelu(state * weights[f"ln.{number}.weight"] + weights[f"ln.{number}.bias"])
    return state @ weights[f"head.{number}.weight"].T, state


def make_weights(kind, vocab):
    """Of as many tokens as occur."""
    weights, noise = {}, torch.Generator().manual_seed(0)

    def add(name, *shape, scale=0.02):
        weights[name] = (torch.randn(shape, generator=noise) * scale).requires_grad_()

    for i in range(COUNT):
        if kind == "medusa":
            add(f"blocks.{i}.layers.0.weight", SIZE, SIZE)
            add(f"blocks.{i}.layers.0.bias", SIZE)
            add(f"lm_heads.{i}.weight", vocab, SIZE)
        else:
            add(f"emb.{i}.weight", vocab, INNER, scale=1.0)
            add(f"proj.{i}.weight", INNER, SIZE if i == 0 else INNER, scale=0.15)
            add(f"ln.{i}.weight", INNER, scale=1.0)
            add(f"ln.{i}.bias", INNER)
            add(f"head.{i}.weight", vocab, INNER)
    return weights


def train(kind, oracle, texts):
    """Minimise the cross entropy of the tokens that follow; those that do not occur get zeros."""
    with torch.no_grad():
        hidden = oracle.model(torch.tensor(texts)).last_hidden_state[:, 4:-1]
    seen, targets = torch.unique(torch.tensor(texts)[:, 5:], return_inverse=True)
    weights = make_weights(kind, len(seen))
    count = targets.shape[1] - COUNT
    optimizer = torch.optim.Adam(weights.values(), 0.02)
    for _ in range(60):
        state, loss = hidden[:, :count], 0.0
        for i in range(COUNT):
            tokens = targets[:, i : i + count]
            logits, state = (medusa if kind == "medusa" else mlp)(weights, i, state, tokens)
            loss += functional.cross_entropy(
                logits.flatten(0, 1), targets[:, 1 + i : 1 + i + count].flatten()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {
        name: torch.zeros(VOCAB, w.shape[1]).index_copy_(0, seen, w.detach())
        if name.startswith(("lm_heads", "head", "emb")) else w.detach()
        for name, w in weights.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"vocab_size": VOCAB})
    return oracle, str(save(oracle, tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def outputs(target):
    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


CONFIGS = {
    "medusa": {"medusa_num_heads": COUNT, "medusa_num_layers": 1},
    "mlp_speculator": {"n_predict": COUNT, "inner_dim": INNER},
}


@pytest.fixture(scope="module")
def folders(target, outputs, tmp_path_factory):
    """Trained heads; also Medusa's under its first names."""
    made = {}
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    for kind, config in CONFIGS.items():
        tensors = train(kind, target[0], texts)
        made[kind] = write(tmp_path_factory.mktemp(kind), config, tensors)
        if kind == "medusa":
            old = {
                name.replace("blocks.", "medusa_heads.").replace(".layers.0", ".0.linear")
                if "blocks" in name else name.replace("lm_heads.", "medusa_heads.").replace(".w", ".1.w"): x
                for name, x in tensors.items()
            }  # fmt: skip
            made["old names"] = write(tmp_path_factory.mktemp("old"), config, old)
            narrow = tensors | {"blocks.0.layers.0.weight": torch.zeros(32, 32)}
            made["narrow"] = write(tmp_path_factory.mktemp("narrow"), config, narrow)
            made["lacking"] = write(tmp_path_factory.mktemp("lacking"), config, {"x": torch.zeros(1)})
    return made


def write(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def drafting(target, folder, method, **options):
    config = {"method": method, "model": folder, "num_speculative_tokens": COUNT}
    return LLM(target[1], **{**COMMON, "speculative_config": config, **options})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "shift"), [("medusa", 0), ("old names", 0), ("mlp_speculator", 0), ("medusa", 1)]
)
def test_trained_heads_guess_well(target, outputs, folders, monkeypatch, kind, shift):
    """shift: the negative twin takes the head of another distance."""
    method = "medusa" if kind == "old names" else kind
    guess = MedusaHeads.guess
    monkeypatch.setattr(
        MedusaHeads, "guess", lambda heads, i, *rest: guess(heads, (i + shift) % COUNT, *rest)
    )
    with drafting(target, folders[kind], method, skip_tokenizer_init=True) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert found == outputs
        values = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
        length = 1 + drafted(llm)[1] / values["vllm:spec_decode_num_drafts"]
    assert (length < 1.5) if shift else (length > 1.6), f"mean acceptance length {length:.2f}"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_texts_are_the_same(target, folders, smollm2_path, method):
    with LLM(target[1], tokenizer=str(smollm2_path), **COMMON) as llm:
        plain = results(llm)
    with drafting(target, folders[method], method, tokenizer=str(smollm2_path)) as llm:
        assert results(llm) == plain
        assert drafted(llm)[0] > 200


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_the_last_stage_guesses(target, outputs, folders, method):
    """What comes true there, the first stage is told with the next step."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    options = {"skip_tokenizer_init": True, "pipeline_parallel_size": 2}
    with drafting(target, folders[method], method, **options) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == outputs
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed >= num_accepted > 100


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("narrow", "made for another model: blocks.*.layers.0.weight has 32, not 48"),
        ("lacking", "The heads lack lm_heads.0.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target, folders, kind, says):
    with pytest.raises(OctavoError) as caught:
        drafting(target, folders[kind], "medusa", skip_tokenizer_init=True)
    assert says in str(caught.value)
