"""BART and T5, which read texts, against transformers' classes, through the whole engine, in float32."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from octavo import LLM, SamplingParams
from octavo.base.errors import PromptTooLong, RequestError
from octavo.runtime.kernels.cpu.library import Library, load_library
from tests.tiny_media import save_tokenizer
from tests.tiny_speech import spread

TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=-1, ignore_eos=True)
VOCAB = 131


T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "n_positions": 128,
    "decoder_start_token_id": 2,
}
CONFIGS = {
    "bart": lambda: BartConfig(
        vocab_size=VOCAB,
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=6,
        encoder_ffn_dim=64,
        decoder_ffn_dim=96,
        max_position_embeddings=128,
        scale_embedding=True,
        forced_bos_token_id=None,
    ),
    "t5": lambda: T5Config(**T5_SIZES),
    "t5_v1.1": lambda: T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5_SIZES),
}
KINDS = list(CONFIGS)


@cache
def oracle_of(kind):
    config = CONFIGS[kind]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = BartForConditionalGeneration if kind == "bart" else T5ForConditionalGeneration
        oracle = made(config).eval()
    spread(oracle, 0)
    folder = Path(mkdtemp())
    oracle.save_pretrained(folder)
    save_tokenizer(folder)
    return oracle, folder


def make_llm(kind="bart", **options):
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    return LLM(str(oracle_of(kind)[1]), logprobs_mode="raw_logits", max_logprobs=-1, **exact | options)


def make_requests(count=6):
    """Texts of many lengths, some shorter than what the decoder has written already."""
    rng, made = np.random.default_rng(0), []
    for index in range(count):
        ids = rng.integers(4, 100, [1, 3, 40, 90, 17, 128][index]).tolist()
        begun = [2, *rng.integers(4, 100, 9 * (index % 3)).tolist()]
        made.append(
            {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": {"prompt_token_ids": begun}}
        )
    return made


@torch.inference_mode()
def difference(requests, outputs, kind="bart"):
    worst = 0.0
    for request, output in zip(requests, outputs, strict=True):
        source = torch.tensor([request["encoder_prompt"]["prompt_token_ids"]])
        tokens = output.outputs[0].token_ids
        ids = torch.tensor([[*output.prompt_token_ids, *tokens[:-1]]])
        expected = oracle_of(kind)[0](input_ids=source, decoder_input_ids=ids).logits[0, -len(tokens) :]
        ours = torch.tensor([[row[i].logprob for i in range(VOCAB)] for row in output.outputs[0].logprobs])
        worst = max(worst, (ours - expected).abs().max().item() / max(1.0, expected.abs().max().item() / 10))
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_one_call_each(kind, monkeypatch):
    if load_library() is None:
        pytest.skip("the kernels of CPUs are missing")
    count, replay = [0], Library.replay

    def counted(library, log):
        count[0] += 1
        replay(library, log)

    monkeypatch.setattr(Library, "replay", counted)
    made = []
    for is_eager in (True, False):
        outputs = make_llm(kind, enforce_eager=is_eager).generate(make_requests(), PARAMS, use_tqdm=False)
        made.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
        assert count[0] == 0 if is_eager else count[0] >= 5
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"long_prefill_token_threshold": 7}, {"max_num_batched_tokens": 64, "max_num_seqs": 2}],
    ids=["whole", "chunks_of_7", "small_steps"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind, options):
    llm, requests = make_llm(kind, **options), make_requests()
    outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    assert difference(requests, outputs, kind) <= TOLERANCE
    again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in outputs]


def test_forms_of_prompts():
    llm = make_llm()
    outputs = llm.generate(
        ["5 6 7", {"prompt_token_ids": [5, 6, 7]}, {"encoder_prompt": "5 6 7", "decoder_prompt": None}],
        PARAMS,
        use_tqdm=False,
    )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == [2] for output in outputs)
    assert all(output.encoder_prompt_token_ids == [5, 6, 7] for output in outputs)
    assert outputs[0].encoder_prompt == outputs[2].encoder_prompt == "5 6 7" and outputs[0].prompt is None
    with pytest.raises(PromptTooLong, match="has 129 tokens; this model's encoder reads at most 128"):
        llm.generate({"prompt_token_ids": [5] * 129}, PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match="The encoder prompt cannot be empty"):
        llm.generate("", PARAMS, use_tqdm=False)


def test_a_broken_model_is_noticed(monkeypatch):
    """Negative twins: as long a source as any, for all; places counted from 0."""
    from octavo.runtime.models import bart
    from octavo.runtime.worker.request_state import RequestState

    requests, add = make_requests(3), RequestState.add

    def lengthened(state, request):
        row = add(state, request)
        state._new_lens.values[-1] = [128]
        return row

    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "add", lengthened)
        assert difference(requests, make_llm().generate(requests, PARAMS, use_tqdm=False)) > 10 * TOLERANCE
    embed = bart.Bart.embed
    with monkeypatch.context() as patch:
        patch.setattr(bart.Bart, "embed", lambda model, batch: embed(model, batch).roll(1, -1))
        assert difference(requests, make_llm().generate(requests, PARAMS, use_tqdm=False)) > 10 * TOLERANCE


def test_broken_distances_are_noticed(monkeypatch):
    """A negative twin: a decoder whose buckets are those of an encoder."""
    from octavo.runtime.layers import distance_bias

    bucket, requests = distance_bias._bucket, make_requests(3)

    def misread(distances, *, is_causal):
        return bucket(distances, is_causal=False)

    monkeypatch.setattr(distance_bias, "_bucket", misread)
    outputs = make_llm("t5").generate(requests, PARAMS, use_tqdm=False)
    assert difference(requests, outputs, "t5") > 10 * TOLERANCE
