"""Steps of encoders replayed from recorded calls, whatever their lengths, give the bits of ordinary steps."""

import numpy as np
import pytest
import transformers

from octavo import LLM, PoolingParams
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.worker.recorded_encoder import RecordedEncoder
from tests.tiny_encoders import make_encoder, save

STEPS = ([5], [1], [64], [3, 1, 65, 7], [2] * 127, [2] * 128, [150] * 3 + [61], [150] * 3 + [62], [5, 150])
"""Tokens of the texts of each step; 128 texts, and 512 tokens, are more than a recording serves."""
KINDS = ("BertModel", "XLMRobertaModel", "ModernBertModel", "NomicBertModel", "GteModel")


@pytest.fixture
def steps(monkeypatch):
    """Of each step that was computed: its texts, its tokens, and how many were replayed for it."""
    computed, repeats, forward, replay = [], [0], RecordedEncoder.forward, Library.replay

    def counted(library, log):
        repeats[0] += 1
        replay(library, log)

    def noted(encoder, batch):
        before, found = repeats[0], forward(encoder, batch)
        computed.append((len(batch.kv_lens), len(batch.positions), repeats[0] - before))
        return found

    monkeypatch.setattr(Library, "replay", counted)
    monkeypatch.setattr(RecordedEncoder, "forward", noted)
    return computed


def results(folder, texts, **options):
    """Vectors of tokens, not normalised: equal ones mean equal hidden states."""
    params = PoolingParams(use_activation=False)
    with LLM(str(folder), dtype="float32", max_num_seqs=200, **options) as llm:
        outputs = [llm.encode(step, params, pooling_task="token_embed", use_tqdm=False) for step in texts]
    return [out.outputs.data.tobytes() for step in outputs for out in step]


def texts_of(oracle):
    rng = np.random.default_rng(2)
    return [[rng.integers(5, oracle.config.vocab_size, n).tolist() for n in lengths] for lengths in STEPS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_recorded_equals_eager(tmp_path, kind, threads, steps):
    oracle = make_encoder(getattr(transformers, kind), kind)
    folder, texts = save(oracle, tmp_path), texts_of(oracle)
    recorded = results(folder, texts, cpu_threads=threads)
    assert steps == [(len(lengths), sum(lengths), 1) for lengths in STEPS]
    assert recorded == results(folder, texts, cpu_threads=2, enforce_eager=True)
    assert len(steps) == len(STEPS)


def test_pairs_of_texts_have_a_recording_of_their_own(tmp_path, steps):
    """A step with types of tokens, one without, both again with other lengths."""
    oracle = make_encoder(transformers.BertForSequenceClassification, "BertModel", num_labels=1)
    folder = save(oracle, tmp_path)
    pairs = [("w1 w2 w3", "w4"), ("w9", "w8 w7 w6 w30 w31"), ("w2", "w3")]

    def scores(**options):
        with LLM(str(folder), dtype="float32", cpu_threads=1, **options) as llm:
            for count in (3, 1, 2):
                firsts, seconds = (list(texts) for texts in zip(*pairs[:count], strict=True))
                yield [out.outputs.score for out in llm.score(firsts, seconds, use_tqdm=False)]
                yield [out.outputs.probs for out in llm.classify(firsts, use_tqdm=False)]

    recorded = list(scores())
    assert [(texts, replays) for texts, _, replays in steps] == [(n, 1) for n in (3, 3, 1, 1, 2, 2)]
    assert recorded == list(scores(enforce_eager=True))


def test_an_encoder_that_computes_with_torch_is_left_alone(tmp_path, steps):
    oracle = make_encoder(transformers.MPNetModel, "MPNetModel")
    folder, texts = save(oracle, tmp_path), texts_of(oracle)[:4]
    assert results(folder, texts) == results(folder, texts, enforce_eager=True)
    assert [replays for *_, replays in steps] == [0] * 4
