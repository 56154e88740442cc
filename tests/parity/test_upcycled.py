"""A dense model whose feed-forward blocks became experts, all alike, says what it said before.

Weights of a token's experts add up to 1, so it does not matter which they are; a token that is dropped,
doubled or mixed with another cannot pass. OCTAVO_UPCYCLED_PROMPTS says how many prompts are tried.
Without it tests/parity/test_models_with_experts.py compares tiny models.
"""

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, CompletionOutput, SamplingParams
from octavo.base.gguf import open_gguf
from tests.gguf_writer import ARRAY, BOOL, FLOAT32, STRING, UINT32, Tensor, gguf_bytes

NUM_PROMPTS = int(os.environ.get("OCTAVO_UPCYCLED_PROMPTS", "6"))
NUM_EXPERTS, TOP_K = 4, 2
STARTS = (
    "The most important thing about {} is",
    "Once upon a time there was a {} that",
    "Question: what is a {}?\nAnswer:",
    "A list of five facts on the subject of {}:\n1.",
    "def make_{}(name):",
    "My grandmother used to say that {}",
    "In the year 1850, {}",
    "The word {} comes from",
    "Dear Sir, I write to you because of my {}, which",
    "{} and",
)
WORDS = (
    *("river", "horse", "bread", "letter", "mountain", "school", "winter", "song", "garden", "doctor"),
    *("ship", "king", "city", "train", "book", "window", "music", "money", "rain", "clock"),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=2)
TIE = 0.02
"""Between the logprobs of two tokens: so near, rounding decides."""


def upcycle(source: Path, target: Path) -> Path:
    """Write a Llama in GGUF with each of its feed-forward blocks NUM_EXPERTS times."""
    file, rng = open_gguf(source), np.random.default_rng(0)
    tensors, data = [], bytearray()

    def add(name: str, shape: tuple[int, ...], type_id: int, raw: np.ndarray) -> None:
        tensors.append(Tensor(name, shape[::-1], type_id, len(data)))
        data.extend(raw.tobytes() + bytes(-raw.nbytes % 32))

    numbers = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}
    for name, info in file.tensors.items():
        raw, type_id = file.data(name), numbers[info.type.name]
        if not name.startswith("blk.") or not name.split(".")[2].startswith(
            ("ffn_up", "ffn_gate", "ffn_down")
        ):
            add(name, info.shape, type_id, raw)
            continue
        add(
            name.replace(".weight", "_exps.weight"),
            (NUM_EXPERTS, *info.shape),
            type_id,
            np.stack([raw] * NUM_EXPERTS),
        )
        if "ffn_up" in name:
            router = rng.standard_normal((NUM_EXPERTS, info.shape[1]), dtype=np.float32)
            add(name.replace("ffn_up", "ffn_gate_inp"), router.shape, 0, router)
    entries = [
        (key, *_typed(value))
        for key, value in file.metadata.items()
        if key.startswith(("general.", "llama.", "tok"))
    ]
    entries += [("llama.expert_count", UINT32, NUM_EXPERTS), ("llama.expert_used_count", UINT32, TOP_K)]
    target.write_bytes(gguf_bytes(entries, tensors, bytes(data)))
    return target


def _typed(value: Any) -> tuple[int, Any]:
    if isinstance(value, list):
        return ARRAY, (_typed(value[0])[0], value)
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
    return kinds[type(value)], value


def answers(path: Path, prompts: list[str], batch: int) -> list[CompletionOutput]:
    """Greedy answers of the model, for prompts of the dense model's tokenizer."""
    options = {"max_model_len": 256, "max_num_seqs": batch, "kv_cache_dtype": "float32"}
    options["activations"] = "float32"  # a CPU with AMX would round to bfloat16
    with LLM(str(path), **options, num_gpu_blocks_override=64 * 20) as llm:
        return [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def pair(smollm2_path, tmp_path_factory):
    return smollm2_path, upcycle(smollm2_path, tmp_path_factory.mktemp("upcycled") / "experts.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 64])
def test_experts_say_what_the_dense_model_says(pair, batch):
    dense, experts = pair
    prompts = [start.format(word) for word, start in product(WORDS, STARTS)][:NUM_PROMPTS]
    pairs = zip(answers(experts, prompts, batch), answers(dense, prompts, batch), strict=True)
    parted = [found for found in pairs if list(found[0].token_ids) != list(found[1].token_ids)]
    assert len(parted) <= len(prompts) // 4
    for ours, theirs in parted:
        place = [a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True)].index(False)
        scores = theirs.logprobs[place]
        assert abs(scores[ours.token_ids[place]].logprob - scores[theirs.token_ids[place]].logprob) < TIE
