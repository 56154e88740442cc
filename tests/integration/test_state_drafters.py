"""EAGLE and MTP guess from hidden states as a plain torch implementation does, and change no text."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.modeling_layers import MtpModel

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.engine.memory_plan import plan_memory
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.workers_drafting import WorkersDrafting
from octavo.metrics import Counter
from octavo.runtime.models.draft_heads import DraftHead
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.speculative.part import DraftPart
from octavo.runtime.speculative.state_drafter import StateDrafter
from octavo.runtime.worker.chained_steps import ChainedSteps
from tests.integration.test_speculation import drafted, results
from tests.tiny_models import make_oracle, save, tiny_config

VOCAB, SIZE, HEADS, KV_HEADS, INNER, DRAFT_VOCAB = 49152, 48, 4, 2, 96, 900
DIM, COUNT, TAPS = 12, 3, (1, 2, 3)
COMMON = {"max_model_len": 128, "num_gpu_blocks_override": 400, "dtype": "float32"}
PROMPTS = [[7 * i + j for j in range(5)] for i in range(24)]
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
SIZES = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "model_type": "llama",
}


@pytest.fixture(autouse=True)
def every_guess_is_tried(monkeypatch):
    """As if guessing and verifying cost nothing."""
    monkeypatch.setattr(StepCosts, "of", lambda costs, rows, more: np.ones(more + 1))
    monkeypatch.setattr(WorkersDrafting, "_best_count", lambda drafting, rows: drafting._wanted.most)


# The same in plain torch: whole sequences, no cache.


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x):
    """x: [..., T, heads, DIM] at the positions 0 …"""
    angles = torch.arange(x.shape[-3])[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1) * sin


def attend(w, x):
    q, k, v = ((x @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, DIM)) for n in ("q", "k", "v"))
    q, k = rotate(q), rotate(k)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, -2) for y in (k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(DIM)
    mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
    seen = torch.einsum("...hqk,...khd->...qhd", (scores + mask).softmax(-1), v)
    return seen.flatten(-2) @ w["self_attn.o_proj.weight"].T


def feed_forward(w, x):
    gate, up = (x @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return (functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def eagle(w, embeds, states):
    """(what gives logits, states for the next guess)"""
    x = torch.cat([embeds, states], -1) @ w["fc.weight"].T
    layer = {name.removeprefix("layers.0."): t for name, t in w.items()}
    x = x + attend(layer, x)
    x = x + feed_forward(layer, norm(x, layer["post_attention_layernorm.weight"]))
    return x, x


def eagle3(w, embeds, states, *, before=False, gives_normed=False):
    layer = {name.removeprefix("midlayer."): t for name, t in w.items()}
    normed = norm(states, layer["hidden_norm.weight"])
    x = (normed if before else states) + attend(
        layer, torch.cat([norm(embeds, layer["input_layernorm.weight"]), normed], -1)
    )
    x = x + feed_forward(layer, norm(x, layer["post_attention_layernorm.weight"]))
    out = norm(x, w["norm.weight"])
    return out, out if gives_normed else x


def combine(w, taps):
    """taps: [..., 3, SIZE]"""
    if "fc_norm.0.weight" in w:
        taps = torch.stack([norm(taps[..., i, :], w[f"fc_norm.{i}.weight"]) for i in range(3)], -2)
    x = taps.flatten(-2)
    if "input_norm.weight" in w:
        x = norm(x, w["input_norm.weight"])
    return x @ w["fc.weight"].T


def make_weights(kind, extra=(), vocab=VOCAB, size=DRAFT_VOCAB):
    noise = torch.Generator().manual_seed(0)

    def of(*shape, scale=None):
        return torch.randn(shape, generator=noise) * (shape[-1] ** -0.5 if scale is None else scale)

    start, inputs = ("midlayer.", 2 * SIZE) if kind == "eagle3" else ("layers.0.", SIZE)
    w = {
        f"{start}self_attn.q_proj.weight": of(HEADS * DIM, inputs),
        f"{start}self_attn.k_proj.weight": of(KV_HEADS * DIM, inputs),
        f"{start}self_attn.v_proj.weight": of(KV_HEADS * DIM, inputs),
        f"{start}self_attn.o_proj.weight": of(SIZE, HEADS * DIM),
        f"{start}mlp.gate_proj.weight": of(INNER, SIZE),
        f"{start}mlp.up_proj.weight": of(INNER, SIZE),
        f"{start}mlp.down_proj.weight": of(SIZE, INNER),
        f"{start}post_attention_layernorm.weight": 1 + of(SIZE, scale=0.1),
        "fc.weight": of(SIZE, 3 * SIZE if kind == "eagle3" else 2 * SIZE),
    }
    if kind == "eagle3":
        names = [f"{start}hidden_norm", f"{start}input_layernorm", "norm", *extra]
        w |= {
            f"{name}.weight": 1 + of(3 * SIZE if name == "input_norm" else SIZE, scale=0.1) for name in names
        }
        w["lm_head.weight"] = of(size, SIZE)
        targets = torch.randperm(vocab, generator=noise)[:size].sort().values
        w["d2t"] = targets - torch.arange(size)
        w["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, targets, True)
    return w


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"]}
EAGLE3 = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
}
INNER_CONFIG = {name: value for name, value in SIZES.items() if name != "architectures"}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": INNER_CONFIG,
    "draft_vocab_size": DRAFT_VOCAB,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "eagle_aux_hidden_state_layer_ids": list(TAPS),
}
KINDS = {
    "eagle": (LLAMA, ()),
    "eagle3": (EAGLE3, ()),
    "eagle3, norms": (EAGLE3 | {"fc_norm": True, "norm_output": True}, [f"fc_norm.{i}" for i in range(3)]),
    "speculators": (SPECULATORS, ["input_norm"]),
}


def method_of(kind):
    return "eagle" if kind == "eagle" else "eagle3"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"vocab_size": VOCAB, "num_hidden_layers": 4})
    return oracle, str(save(oracle, tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random heads: (folder, weights)."""
    root = tmp_path_factory.mktemp("heads")
    made = {}
    for kind, (config, extra) in KINDS.items():
        weights = make_weights(method_of(kind), extra)
        made[kind] = write(root / kind, config, weights), weights
    return made


def drafting(target, folder, method, **options):
    config = {"method": method, "model": folder, "num_speculative_tokens": COUNT}
    return LLM(target[1], **{**COMMON, "speculative_config": config, **options})


def states_of(oracle, ids):
    """The oracle's ([T, SIZE] last states, [T, 3, SIZE] inputs of the layers that are read)."""
    with torch.no_grad():
        out = oracle.model(torch.tensor([ids]), output_hidden_states=True)
    return out.last_hidden_state[0], torch.stack([out.hidden_states[i][0] for i in TAPS], 1)


def guesses(kind, weights, oracle, ids):
    """COUNT greedy guesses behind the known tokens `ids`, all but the last computed."""
    last, taps = states_of(oracle, ids[:-1])
    embed, config = oracle.get_input_embeddings().weight.detach(), KINDS[kind][0]
    states, tokens = (last if kind == "eagle" else combine(weights, taps)), list(ids[1:])
    for _ in range(COUNT):
        embeds = embed[torch.tensor(tokens)]
        if kind == "eagle":
            out, following = eagle(weights, embeds, states)
            tokens.append(int((out[-1] @ oracle.lm_head.weight.T).argmax()))
        else:
            flags = {
                "before": config.get("norm_before_residual", False),
                "gives_normed": config.get("norm_output", False),
            }
            out, following = eagle3(weights, embeds, states, **flags)
            best = int((out[-1] @ weights["lm_head.weight"].T).argmax())
            tokens.append(best + int(weights["d2t"][best]))
        states = torch.cat([states, following[-1:]])
    return tokens[-COUNT:]


PROMPT = {"prompt_token_ids": [(11 * i + 3) % 127 for i in range(45)]}


def noted_guesses(monkeypatch, broken):
    """What is known of the first request, and what is guessed behind it, by step."""
    if broken:
        put = DraftHead.put
        monkeypatch.setattr(DraftHead, "put", lambda head, states, *, stays: put(head, -states, stays=stays))
    seen, follow = [], DraftPart.follow

    def noted(part, step, work, hidden, outcome):
        follow(part, step, work, hidden, outcome)
        row = part._state.rows(step.request_ids)[0]
        if drafts := outcome.result.drafts.get(0):
            length = int(part._state.num_tokens[row])
            seen.append((part._state.token_ids[row, :length].tolist(), drafts))

    monkeypatch.setattr(DraftPart, "follow", noted)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_guesses_are_those_of_plain_torch(target, folders, monkeypatch, kind, broken):
    """broken: the negative twin reads the states with another sign."""
    folder, weights = folders[kind]
    seen = noted_guesses(monkeypatch, broken)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 20, "max_num_seqs": 4}
    with drafting(target, folder, method_of(kind), **options) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=9, temperature=0), use_tqdm=False)
    assert len(seen) >= 3
    agree = [guesses(kind, weights, target[0], ids)[: len(drafts)] == drafts for ids, drafts in seen]
    assert all(agree) != broken


@pytest.mark.matrix(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_captured_guesses_are_those_of_plain_torch(target, folders, monkeypatch, kind, broken):
    """Steps that guess run one behind the other without the host; broken: they begin with other states."""
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    if broken:
        monkeypatch.setattr(DraftHead, "go_on", lambda head, rows: head.states.neg_())
    found, replay = [], StateDrafter._replay

    def noted(drafter, turn, states):
        found.append(replay(drafter, turn, states))
        return found[-1]

    monkeypatch.setattr(StateDrafter, "_replay", noted)
    folder, weights = folders[kind]
    seen = noted_guesses(monkeypatch, False)
    prompts = [PROMPT, *({"prompt_token_ids": ids} for ids in PROMPTS[:2])]
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (12, 9, 5)]
    with drafting(target, folder, method_of(kind), skip_tokenizer_init=True, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in plain]
    assert sum(guess is not None for guess in found) >= 4 and len(seen) >= 3
    agree = [guesses(kind, weights, target[0], ids)[: len(drafts)] == drafts for ids, drafts in seen]
    assert all(agree) != broken


@pytest.mark.slow
def test_steps_that_wait_change_nothing(target, folders, smollm2_path, plain):
    """With two steps in flight, each begins with what came of the one before: on a CPU, by waiting for it."""
    common = {"tokenizer": str(smollm2_path), "steps_in_flight": 2, "max_num_seqs": 24}
    with drafting(target, folders["eagle3"][0], "eagle3", **common) as llm:
        assert results(llm) == plain
        assert drafted(llm)[0] > 100


@pytest.mark.matrix
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
def test_chained_steps_change_nothing(target, folders, monkeypatch, shift):
    """Nobody waits to know how long a request is; shifted, the negative twin: it is noted as shorter."""
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    rows, verify = [], ChainedSteps.verify

    def noted(steps, inputs, *rest):
        rows.append(len(inputs.rows))
        lasts = verify(steps, inputs, *rest)
        steps.state.lengths -= shift
        return lasts

    monkeypatch.setattr(ChainedSteps, "verify", noted)
    kinds = [{"temperature": 0}, {"temperature": 0.8}, {"top_p": 0.9, "top_k": 50}, {"n": 3}]
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 5 + 7 * (i % 5), "detokenize": False} | kinds[i % 4])
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def texts(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [each.token_ids for out in outputs for each in out.outputs]

    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        plain = texts(llm)
    options = {"skip_tokenizer_init": True, "steps_in_flight": 2, "max_num_seqs": 16, "block_size": 16}
    with drafting(target, folders["eagle3"][0], "eagle3", **options | {"num_gpu_blocks_override": 60}) as llm:
        assert (texts(llm) == plain) != shift
        assert drafted(llm)[0] > 50
    assert len(rows) > 20 and max(rows) > 8


@pytest.mark.matrix(5)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "speculators"])
def test_chained_guesses_are_those_of_plain_torch(target, folders, monkeypatch, kind):
    """Behind steps that nobody waits for, all the guesses are read from the device."""
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    folder, weights = folders[kind]
    seen, chain = [], StateDrafter.chain

    def noted(drafter, links):
        chain(drafter, links)
        row, state = int(links.inputs.rows[links.inputs.heads[0]]), links.state
        length = int(state.lengths[row])
        if row != state.spare_row:
            ids = state.token_ids[row].tolist()
            seen.append((ids[:length], ids[length : length + int(links.inputs.num_wanted[0])]))

    monkeypatch.setattr(StateDrafter, "chain", noted)
    prompts = [PROMPT, *({"prompt_token_ids": ids} for ids in PROMPTS[:2])]
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (30, 25, 12)]
    options = {"skip_tokenizer_init": True, "max_num_seqs": 24, "steps_in_flight": 2}
    with drafting(target, folder, method_of(kind), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in plain]
    assert sum(len(drafts) == COUNT for _, drafts in seen) >= 3
    assert all(guesses(kind, weights, target[0], ids)[: len(drafts)] == drafts for ids, drafts in seen)


def mtp_guesses(oracle, mtp, ids):
    """What transformers' layer of MTP guesses behind `ids`, taken again for the second."""
    with torch.no_grad():
        states, tokens = oracle.model(torch.tensor([ids[:-1]])).last_hidden_state, list(ids[1:])
        for _ in range(2):
            inputs, places = torch.tensor([tokens]), torch.arange(1, len(tokens) + 1)[None]
            out = mtp.forward_layer(0, states, places, None, input_ids=inputs)
            tokens.append(int(oracle.lm_head(out[:, -1]).argmax()))
            states = torch.cat([states, out[:, -1:]], 1)
    return tokens[-2:]


def make_mtp(oracle):
    """Make a random layer of MTP of transformers' own."""
    torch.manual_seed(0)
    mtp = MtpModel(oracle, 1).eval()
    with torch.no_grad():
        for parameter in mtp.layers.parameters():  # transformers leaves experts as memory was
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    return mtp


def store_mtp(mtp, path, count):
    """Put it behind the `count` layers of the model that is saved there."""
    stored = {
        name.replace("layers.0.", f"model.layers.{count}.")
        .replace("mtp_block.", "")
        .replace("post_norm", "shared_head.norm"): x
        for name, x in mtp.state_dict().items()
        if name.startswith("layers.0.")
    }
    stored |= load_file(path / "model.safetensors")
    save_file({name: x.contiguous() for name, x in stored.items()}, path / "model.safetensors")


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_mtp_guesses_as_transformers_does(tmp_path, monkeypatch, architecture, broken):
    oracle = make_oracle(tiny_config(architecture) | {"num_nextn_predict_layers": 1})
    path, mtp = save(oracle, tmp_path / "target"), make_mtp(oracle)
    store_mtp(mtp, path, oracle.config.num_hidden_layers)
    seen = noted_guesses(monkeypatch, broken)
    wanted = {"method": "deepseek_mtp", "num_speculative_tokens": 2, "enable_adaptive_verification": False}
    common = COMMON | {"max_num_batched_tokens": 20, "skip_tokenizer_init": True}
    with LLM(str(path), speculative_config=wanted, **common) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)
    assert len(seen) >= 6
    agree = [mtp_guesses(oracle, mtp, ids)[: len(drafts)] == drafts for ids, drafts in seen]
    assert all(agree) != broken


class QwenMTP(torch.nn.Module):
    """A layer of MTP of transformers' own modules: it has none for these models, but skips their weights."""

    def __init__(self, oracle):
        super().__init__()
        config, base = oracle.config, oracle.model
        place = config.layer_types.index("full_attention")
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        norms = [type(base.norm)(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.layers = torch.nn.ModuleList([type(base.layers[place])(config, place)])

    def guesses(self, oracle, ids):
        """Two, behind `ids`."""
        with torch.no_grad():
            states, tokens = oracle.model(torch.tensor([ids[:-1]])).last_hidden_state, list(ids[1:])
            for _ in range(2):
                embeds = oracle.get_input_embeddings()(torch.tensor([tokens]))
                pair = torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)], -1)
                x, places = self.fc(pair), torch.arange(len(tokens))[None]
                mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
                rotation = oracle.model.rotary_emb(x, places)
                x = self.layers[0](x, position_embeddings=rotation, attention_mask=mask)
                out = self.norm(x[0] if isinstance(x, tuple) else x)
                tokens.append(int(oracle.lm_head(out[:, -1]).argmax()))
                states = torch.cat([states, out[:, -1:]], 1)
        return tokens[-2:]


EXACT = {"activations": "float32", "kv_cache_dtype": "float32"}


def save_with_mtp(oracle, folder):
    """Save a model of Qwen's with a random layer of MTP; (its path, the layer)."""
    path = save(oracle, folder)
    torch.manual_seed(0)
    mtp = QwenMTP(oracle).eval()
    with torch.no_grad():
        for parameter in mtp.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.15))
    stored = {f"mtp.{name}": x for name, x in mtp.state_dict().items()} | load_file(
        path / "model.safetensors"
    )
    save_file({name: x.contiguous() for name, x in stored.items()}, path / "model.safetensors")
    return str(path), mtp


@pytest.mark.parametrize(
    "architecture", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
)
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_mtp_of_recurrent_models(tmp_path, monkeypatch, architecture, broken):
    oracle = make_oracle(tiny_config(architecture))
    path, mtp = save_with_mtp(oracle, tmp_path / "target")
    seen = noted_guesses(monkeypatch, broken)
    common = COMMON | {"skip_tokenizer_init": True, "max_num_batched_tokens": 20}
    prompts = [PROMPT, {"prompt_token_ids": PROMPTS[1]}]
    with LLM(path, **common, **EXACT) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(path, spec_method="mtp", spec_tokens=2, **common, **EXACT) as llm:
        outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert outputs == plain and len(seen) >= 3
    agree = [mtp.guesses(oracle, ids)[: len(drafts)] == drafts for ids, drafts in seen]
    assert all(agree) != broken


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_plan_counts_the_head(target, folders, kind):
    given = {"method": kind, "model": folders[kind][0]}
    without, both = (
        plan_memory(resolve(EngineArgs(model=target[1], device="cpu", dtype="float32", **options)))
        for options in ({}, {"speculative_config": given})
    )
    own = [w for name, w in folders[kind][1].items() if name not in ("d2t", "t2d")]
    assert both.weight_bytes - without.weight_bytes == sum(w.numel() * 4 for w in own)
    assert both.kv_bytes_per_token > without.kv_bytes_per_token


def test_a_model_without_mtp_is_refused(target):
    with pytest.raises(OctavoError, match="octavo knows no layers of MTP of Llama"):
        LLM(target[1], skip_tokenizer_init=True, spec_method="mtp", **COMMON)


@pytest.fixture(scope="module")
def plain(target, smollm2_path):
    with LLM(target[1], tokenizer=str(smollm2_path), **COMMON) as llm:
        return results(llm)


SHORT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, "max_num_seqs": 12}


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle", {}), ("eagle3", SHORT), ("speculators", {})],
    ids=["eagle", "eagle3, preempted and in chunks", "speculators"],
)
def test_texts_are_the_same(target, folders, smollm2_path, plain, kind, options):
    with drafting(target, folders[kind][0], method_of(kind), tokenizer=str(smollm2_path), **options) as llm:
        assert results(llm) == plain
        assert drafted(llm)[0] > 100


@pytest.mark.slow
def test_ranks_guess_alike(target, folders):
    prompts, common = [{"prompt_token_ids": ids} for ids in PROMPTS[:6]], {"tensor_parallel_size": 2}
    with LLM(target[1], skip_tokenizer_init=True, **COMMON, **common) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with drafting(target, folders["eagle3"][0], "eagle3", skip_tokenizer_init=True, **common) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == plain
        assert drafted(llm)[0] > 20


FEW, FEWER = 400, 300
"""Vocabularies of the models that heads are trained for, and of the heads with one of their own."""


def train(kind, oracle, texts, vocab=FEW, size=FEWER):
    """Minimise the cross entropy of each token from the model's states, and again from the head's own."""
    weights, texts = make_weights(kind, (), vocab, size), torch.tensor(texts)
    with torch.no_grad():
        out = oracle.model(texts, output_hidden_states=True)
        embeds = oracle.get_input_embeddings().weight[texts][:, 1:]
        last, taps = out.last_hidden_state, torch.stack([out.hidden_states[i] for i in TAPS], 2)
        ids = texts.unique()
        head = oracle.lm_head.weight.detach()[ids]
    if kind == "eagle3":
        common = torch.bincount(texts.flatten(), minlength=vocab).argsort(descending=True, stable=True)
        head, ids = None, common[:size].sort().values
        weights["d2t"] = ids - torch.arange(size)
    place = torch.full((vocab,), -100).index_copy_(0, ids, torch.arange(len(ids)))
    targets = place[texts]
    optimizer = torch.optim.Adam(
        [w.requires_grad_() for w in weights.values() if w.is_floating_point()], 0.01
    )
    for _ in range(120):
        states, loss = (last if kind == "eagle" else combine(weights, taps))[:, :-1], 0.0
        for step in range(2):
            out, states = (
                eagle(weights, embeds, states) if kind == "eagle" else eagle3(weights, embeds, states)
            )
            logits = out[:, 4 + step : -1] @ (weights["lm_head.weight"] if head is None else head).T
            loss += functional.cross_entropy(logits.flatten(0, 1), targets[:, 6 + step :].flatten())
            states = torch.cat([states[:, :1] * 0, states[:, :-1]], 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: w.detach() for name, w in weights.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
def test_trained_heads_guess_well(tmp_path, monkeypatch, kind, shift):
    """shift: the negative twin reads other tokens' states."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"vocab_size": FEW, "num_hidden_layers": 4})
    small = oracle, str(save(oracle, tmp_path / "target"))
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(small[1], skip_tokenizer_init=True, **COMMON) as llm:
        outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    config = KINDS[kind][0] | {"vocab_size": FEW}
    config |= {"draft_vocab_size": FEWER} if kind == "eagle3" else {}
    folder = write(tmp_path / "head", config, train(kind, oracle, texts))
    put = DraftHead.put
    monkeypatch.setattr(
        DraftHead, "put", lambda head, states, *, stays: put(head, states.roll(7 * shift, 0), stays=stays)
    )
    with drafting(small, folder, kind, skip_tokenizer_init=True) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == outputs
        values = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
        length = 1 + drafted(llm)[1] / values["vllm:spec_decode_num_drafts"]
    assert (length < 1.5) if shift else (length > 1.6), f"mean acceptance length {length:.2f}"


def test_a_file_of_a_whole_model_is_no_head(smollm2_path):
    with pytest.raises(OctavoError, match="draft heads are read from folders of safetensors"):
        drafting((None, str(smollm2_path)), str(smollm2_path), "eagle3")


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (LLAMA | {"hidden_size": 64}, {}, "it reads hidden states of 64, not of 48"),
        (
            LLAMA | {"vocab_size": 131},
            {},
            "should have the same vocabulary size. Target model vocab_size=49152",
        ),
        (LLAMA, {"fc.weight": None}, "lacks 1 weights: fc.weight"),
        (EAGLE3, {"d2t": None}, "draft_vocab_size=900 needs a tensor d2t"),
        (EAGLE3, {"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}, "d2t names tokens that the vocabulary has not"),
        (EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, {}, "reads layers"),
        (EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}}, {}, "each once"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target, folders, tmp_path, config, change, says):
    kind = "eagle3" if "draft_vocab_size" in config else "eagle"
    tensors = {name: t for name, t in (folders[kind][1] | change).items() if t is not None}
    with pytest.raises(OctavoError) as caught:
        drafting(target, write(tmp_path / "head", config, tensors), kind, skip_tokenizer_init=True)
    assert says in str(caught.value)
