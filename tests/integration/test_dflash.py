"""DFlash guesses blocks as a plain torch implementation of its paper does, and changes no text."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from octavo.runtime.models.dflash import DFlash
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.speculative.block_drafter import BlockDrafter
from tests.integration.test_speculation import drafted, results
from tests.integration.test_state_drafters import (
    COMMON,
    COUNT,
    DIM,
    DRAFT_VOCAB,
    GREEDY,
    HEADS,
    INNER,
    INNER_CONFIG,
    KV_HEADS,
    PROMPT,
    PROMPTS,
    SHORT,
    SIZE,
    SIZES,
    TAPS,
    VOCAB,
    every_guess_is_tried,  # noqa: F401  # a fixture of all tests here
    feed_forward,
    norm,
    noted_guesses,
    plain,  # noqa: F401  # a fixture
    rotate,
    target,  # noqa: F401  # a fixture
    write,
)

MASK, LAYERS = 77, 2
OWN = {"model_type": "qwen3", "num_hidden_layers": LAYERS, "block_size": 8}
RELEASE = SIZES | OWN | {"architectures": ["DFlashDraftModel"]}
RELEASE |= {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]}}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": INNER_CONFIG | OWN,
    "draft_vocab_size": DRAFT_VOCAB,
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": list(TAPS),
}
KINDS = {"release": RELEASE, "speculators": SPECULATORS}


def make_weights(kind):
    noise = torch.Generator().manual_seed(0)

    def of(*shape):
        return torch.randn(shape, generator=noise) * shape[-1] ** -0.5

    def ones(size):
        return 1 + 0.1 * torch.randn(size, generator=noise)

    weights = {"fc.weight": of(SIZE, 3 * SIZE), "hidden_norm.weight": ones(SIZE), "norm.weight": ones(SIZE)}
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": of(HEADS * DIM, SIZE),
            "self_attn.k_proj": of(KV_HEADS * DIM, SIZE),
            "self_attn.v_proj": of(KV_HEADS * DIM, SIZE),
            "self_attn.o_proj": of(SIZE, HEADS * DIM),
            "self_attn.q_norm": ones(DIM),
            "self_attn.k_norm": ones(DIM),
            "mlp.gate_proj": of(INNER, SIZE),
            "mlp.up_proj": of(INNER, SIZE),
            "mlp.down_proj": of(SIZE, INNER),
            "input_layernorm": ones(SIZE),
            "post_attention_layernorm": ones(SIZE),
        }
        weights |= {f"layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    if kind == "speculators":
        weights["lm_head.weight"] = of(DRAFT_VOCAB, SIZE)
        targets = torch.randperm(VOCAB, generator=noise)[:DRAFT_VOCAB].sort().values
        weights["d2t"] = targets - torch.arange(DRAFT_VOCAB)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, targets, True)
    return weights


def states_of_masks(w, oracle, ids, count):
    """Of those behind `ids`, [count, SIZE]: queries see each other and keys made of the model's states."""
    with torch.no_grad():
        out = oracle.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
    context = torch.cat([out.hidden_states[i][0] for i in TAPS], -1) @ w["fc.weight"].T
    context = norm(context, w["hidden_norm.weight"])
    x = oracle.get_input_embeddings().weight.detach()[torch.tensor([ids[-1], *[MASK] * count])]
    for i in range(LAYERS):
        layer = {name.removeprefix(f"layers.{i}."): t for name, t in w.items()}
        normed = norm(x, layer["input_layernorm.weight"])
        both = torch.cat([context, normed])
        k, v = ((both @ layer[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, DIM)) for n in "kv")
        q = (normed @ layer["self_attn.q_proj.weight"].T).unflatten(-1, (-1, DIM))
        k = rotate(norm(k, layer["self_attn.k_norm.weight"]))
        q = norm(q, layer["self_attn.q_norm.weight"])
        q = rotate(torch.cat([q.new_zeros(len(context), *q.shape[1:]), q]))[len(context) :]
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        chances = (torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", chances, v).flatten(1)
        x = x + seen @ layer["self_attn.o_proj.weight"].T
        x = x + feed_forward(layer, norm(x, layer["post_attention_layernorm.weight"]))
    return norm(x, w["norm.weight"])[1:]


def guesses(kind, w, oracle, ids, count):
    """Of the masks behind `ids`."""
    states = states_of_masks(w, oracle, ids, count)
    if "d2t" not in w:
        return (states @ oracle.lm_head.weight.T).argmax(-1).tolist()
    best = (states @ w["lm_head.weight"].T).argmax(-1)
    return (best + w["d2t"][best]).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random heads: (folder, weights)."""
    root = tmp_path_factory.mktemp("heads")
    made = {kind: make_weights(kind) for kind in KINDS}
    return {kind: (write(root / kind, KINDS[kind], weights), weights) for kind, weights in made.items()}


def drafting(target, folder, **options):  # noqa: F811
    config = {"method": "dflash", "model": folder, "num_speculative_tokens": COUNT, "parallel_drafting": True}
    return LLM(target[1], **{**COMMON, "speculative_config": config, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_guesses_are_those_of_plain_torch(target, folders, monkeypatch, kind, broken):  # noqa: F811
    """broken: the negative twin keeps the states with another sign."""
    folder, weights = folders[kind]
    if broken:
        keep = DFlash.keep
        monkeypatch.setattr(DFlash, "keep", lambda head, states, batch: keep(head, -states, batch))
    seen = noted_guesses(monkeypatch, broken=False)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 20, "max_num_seqs": 4}
    prompts = [PROMPT, {"prompt_token_ids": PROMPTS[0]}]
    with drafting(target, folder, **options) as llm:
        outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)] == outputs
    assert len(seen) >= 3
    agree = [guesses(kind, weights, target[0], ids, len(drafts)) == drafts for ids, drafts in seen]
    assert all(agree) != broken


@pytest.mark.parametrize("kind", KINDS)
def test_chained_guesses_are_those_of_plain_torch(target, folders, monkeypatch, kind):  # noqa: F811
    """Behind steps that nobody waits for, all the guesses are read from the device."""
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    folder, weights = folders[kind]
    seen, chain = [], BlockDrafter.chain

    def noted(drafter, links):
        chain(drafter, links)
        row, state = int(links.inputs.rows[links.inputs.heads[0]]), links.state
        length, count = int(state.lengths[row]), int(links.inputs.num_wanted[0])
        if row != state.spare_row and count > 0:
            ids = state.token_ids[row].tolist()
            seen.append((ids[:length], ids[length : length + count]))

    monkeypatch.setattr(BlockDrafter, "chain", noted)
    prompts = [PROMPT, *({"prompt_token_ids": ids} for ids in PROMPTS[:2])]
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (30, 25, 12)]
    options = {"skip_tokenizer_init": True, "max_num_seqs": 24, "steps_in_flight": 2, "block_size": 16}
    with drafting(target, folder, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        plainly = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in plainly]
    assert sum(len(drafts) == COUNT for _, drafts in seen) >= 3
    assert all(guesses(kind, weights, target[0], ids, len(drafts)) == drafts for ids, drafts in seen)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SHORT], ids=["", "preempted and in chunks"])
def test_texts_are_the_same(target, folders, smollm2_path, plain, options):  # noqa: F811
    """With every sampling parameter."""
    with drafting(target, folders["release"][0], tokenizer=str(smollm2_path), **options) as llm:
        assert results(llm) == plain
        assert drafted(llm)[0] > 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dflash_config": {"mask_token_id": MASK}}, "has no target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "has no mask_token_id"),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 9]}}, "reads layers"),
        (
            {"dflash_config": RELEASE["dflash_config"] | {"causal": True}},
            "heads with causal are not supported",
        ),
        ({"hidden_size": 64}, "it reads hidden states of 64, not of 48"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target, folders, tmp_path, change, says):  # noqa: F811
    with pytest.raises(OctavoError) as caught:
        drafting(
            target,
            write(tmp_path / "head", RELEASE | change, folders["release"][1]),
            skip_tokenizer_init=True,
        )
    assert says in str(caught.value)
