"""Every way of guessing under every way of choosing tokens, of models of several kinds: with = without.

Compared are texts, tokens, log probabilities (bit by bit) and reasons to finish. A few prompts are taken;
OCTAVO_SPECULATION_PROMPTS=500 takes so many of the documentation's paragraphs. OCTAVO_SPECULATION_SLICE=3/24
takes each 24th of them, from the fourth on, so that processes share the work. OCTAVO_SPECULATION_ROWS=FILE
appends a JSON line per way of guessing and choosing: prompts, answers, how many differ, what was guessed.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.integration import test_dflash as dflash
from tests.integration import test_draft_heads as heads
from tests.integration import test_state_drafters as states
from tests.integration.test_drafters import Repeats
from tests.integration.test_speculation import PARAMS
from tests.integration.test_state_drafters import every_guess_is_tried  # noqa: F401  # a fixture of all tests
from tests.tiny_models import make_oracle, save, tiny_config

SETTINGS = PARAMS | {
    "drawn, 1.0": {"temperature": 1.0, "seed": 10},
    "top-p": {"temperature": 1.0, "seed": 11, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "seed": 12, "min_p": 0.05},
}
PREEMPTED = ("greedy", "drawn", "penalties", "three")
"""Settings that are asked for again where the cache holds few requests."""

PAGES = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
TEXTS = [text[:100] for page in PAGES for text in page.read_text().split("\n\n") if len(text) > 80]
"""So long that their answers fit the smallest cache, too."""
START, STEP = map(int, os.environ.get("OCTAVO_SPECULATION_SLICE", "0/1").split("/"))
CHOSEN = list(dict.fromkeys(TEXTS))[: int(os.environ.get("OCTAVO_SPECULATION_PROMPTS", "3"))][START::STEP]
ROWS = os.environ.get("OCTAVO_SPECULATION_ROWS")

COMMON = {"max_model_len": 256, "num_gpu_blocks_override": 1500}
TIGHT = {"num_gpu_blocks_override": 24, "block_size": 16, "max_num_seqs": 12}
RECURRENT = ("qwen3_5", "falcon_h1")
"""Models whose requests keep little: hardly ever is one preempted (in test_recurrent_models some are)."""
OFTEN = [5, 9, *range(250, 290), 354]
"""Tokens that settings speak of among them."""
COUNT = {"num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
CASES = [
    ("llama", NGRAM),
    ("llama", {"method": "suffix"}),
    ("llama", {"method": "jump_ahead"}),
    ("llama", NGRAM | {"method": "ngram_gpu"}),
    ("llama", {"method": "draft_model", "model": "llama"} | COUNT),
    ("llama", {"method": "draft_model", "model": "another"} | COUNT),
    ("llama", {"method": "eagle", "model": "eagle"} | COUNT),
    ("llama", {"method": "eagle3", "model": "eagle3"} | COUNT),
    ("llama", {"method": "eagle3", "model": "speculators"} | COUNT),
    ("llama", {"method": "dflash", "model": "dflash"} | COUNT),
    ("llama", {"method": "medusa", "model": "medusa"} | COUNT),
    ("llama", {"method": "mlp_speculator", "model": "mlp_speculator"} | COUNT),
    ("llama", {"method": "custom_class", "model": f"{Repeats.__module__}.Repeats"} | COUNT),
    ("qwen3_5", NGRAM),
    ("qwen3_5", {"method": "suffix"}),
    ("qwen3_5", {"method": "draft_model", "model": "llama"} | COUNT),
    ("qwen3_5", {"method": "mtp", "num_speculative_tokens": 2}),
    ("falcon_h1", NGRAM),
    ("falcon_h1", {"method": "suffix"}),
    ("falcon_h1", {"method": "draft_model", "model": "llama"} | COUNT),
    ("smollm2", NGRAM),
    ("smollm2", {"method": "suffix"}),
    ("smollm2", {"method": "jump_ahead"}),
]
"""Models, and how their tokens are guessed."""
IDS = [", ".join((name, *filter(None, (how["method"], how.get("model"))))) for name, how in CASES]


def talkative(config):
    """A random model that mostly says few different tokens, so that guesses come true and fail."""
    oracle = make_oracle(config | {"tie_word_embeddings": False})
    with torch.no_grad():
        weight = oracle.get_output_embeddings().weight
        often = 4 * weight[OFTEN]  # at a temperature the many others weigh less then
        weight.mul_(0.05)
        weight[OFTEN] = often
    return oracle


class Models:
    """Options of engines by name; folders of models and heads, made when they are asked for."""

    def __init__(self, root, tokenizer):
        self._root, self._tokenizer, self._folders, self._plain = root, tokenizer, {}, {}
        self._oracle = None

    def options(self, name, guessing=None):
        if guessing and guessing.get("method") != "custom_class" and "model" in guessing:
            guessing = guessing | {"model": self.folder(guessing["model"])}
        options = COMMON | ({"speculative_config": guessing} if guessing else {})
        if name == "smollm2":
            return options | {"model": self._tokenizer}
        return options | {"model": self.folder(name), "tokenizer": self._tokenizer, "dtype": "float32"}

    def plain(self, name):
        if name not in self._plain:
            self._plain[name] = answers(self.options(name), SETTINGS)[0]
        return self._plain[name]

    def folder(self, name):
        if name not in self._folders:
            self._folders[name] = self._make(name, self._root / name)
        return self._folders[name]

    def _make(self, name, path):
        vocab = {"vocab_size": states.VOCAB}
        if name == "llama":
            config = tiny_config("LlamaForCausalLM") | vocab | {"num_hidden_layers": 4}
            self._oracle = talkative(config)
            return str(save(self._oracle, path))
        if name == "another":
            sizes = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
            return str(save(talkative(tiny_config("LlamaForCausalLM") | vocab | sizes), path))
        if name == "qwen3_5":
            return states.save_with_mtp(talkative(tiny_config("Qwen3_5ForCausalLM") | vocab), path)[0]
        if name == "falcon_h1":
            return str(save(talkative(tiny_config("FalconH1ForCausalLM") | vocab), path))
        if name == "dflash":
            return states.write(path, dflash.RELEASE, dflash.make_weights("release"))
        if name == "speculators":
            config, extra = states.KINDS[name]
            return states.write(path, config, states.make_weights("eagle3", extra))
        if name in heads.CONFIGS:
            return states.write(path, heads.CONFIGS[name], heads.train(name, *self._lesson()))
        sizes = states.VOCAB, states.DRAFT_VOCAB
        return states.write(path, states.KINDS[name][0], states.train(name, *self._lesson(), *sizes))

    def _lesson(self):
        """What heads are trained with: (the model, greedy outputs of 24 prompts)"""
        with LLM(**self.options("llama")) as llm:
            ids = [ids for text in TEXTS if len(ids := llm.get_tokenizer().encode(text)) >= 20][-24:]
            prompts = [{"prompt_token_ids": each[:20]} for each in ids]
            outputs = llm.generate(prompts, states.GREEDY, use_tqdm=False)
        return self._oracle, [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]


def answers(options, settings):
    """({setting: what came of each prompt}, {setting: drafts, and what came true of them}, preemptions)"""
    params, prompts = [], []
    for name in settings:
        for place, text in enumerate(CHOSEN):
            given = {"max_tokens": 24, "temperature": 0.0} | SETTINGS[name]
            given |= {"seed": given["seed"] + 100 * (START + STEP * place)} if "seed" in given else {}
            params.append(SamplingParams(**given))
            prompts.append(text)
    with LLM(**options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    found, counts = {}, {}
    for place, name in enumerate(settings):
        of = outputs[place * len(CHOSEN) : (place + 1) * len(CHOSEN)]
        found[name] = [
            ([(o.text, o.token_ids, o.logprobs, o.finish_reason) for o in out.outputs], out.prompt_logprobs)
            for out in of
        ]
        told = [o.spec_decode_metrics for out in of for o in out.outputs if o.spec_decode_metrics]
        counts[name] = Counter(drafts=0, accepted=0)
        for each in told:
            counts[name].update(drafts=each.num_draft_tokens, accepted=each.num_accepted_tokens)
    return found, counts, preempted


def compare(models, name, guessing, **more):
    """Rows; `more` are options beside."""
    settings = PREEMPTED if more else SETTINGS
    found, counts, preempted = answers(models.options(name, guessing) | more, settings)
    for setting in settings:
        pairs = [
            (one, other)
            for mine, plain in zip(found[setting], models.plain(name)[setting], strict=True)
            for one, other in zip((*mine[0], mine[1]), (*plain[0], plain[1]), strict=True)
        ]
        yield {
            "model": name,
            "method": guessing["method"],
            "draft": guessing.get("model", ""),
            "setting": f"preemption, {setting}" if more else setting,
            "prompts": len(CHOSEN),
            "answers": sum(len(mine[0]) for mine in found[setting]),
            "differing": sum(one != other for one, other in pairs),
            **counts[setting],
            **({"preempted": preempted} if more else {}),
        }


@pytest.fixture(scope="module")
def models(tmp_path_factory, smollm2_path):
    return Models(tmp_path_factory.mktemp("models"), str(smollm2_path))


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "guessing"), CASES, ids=IDS)
def test_texts_are_the_same(models, name, guessing):
    rows = [*compare(models, name, guessing), *compare(models, name, guessing, **TIGHT)]
    if ROWS:
        with Path(ROWS).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    assert not [row for row in rows if row["differing"]]
    assert sum(row["drafts"] for row in rows) > 0
    assert rows[-1]["preempted"] > 0 or name in RECURRENT


@pytest.mark.slow
def test_a_change_shows(models, monkeypatch):
    """The negative twin: penalties count drafts that were refused."""

    def at_once(sampler, logits, rows, positions, masks, expected):
        return sampler.sample(logits, rows, positions, masks)

    monkeypatch.setattr("octavo.runtime.heads.token.sample_in_order", at_once)
    rows = compare(models, "llama", {"method": "draft_model", "model": "another"} | COUNT)
    differing = {row["setting"]: row["differing"] for row in rows}
    assert differing["penalties"] and not differing["greedy"]
