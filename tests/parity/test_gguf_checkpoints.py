"""The two real GGUF models against transformers' classes, with the file's weights as `gguf` dequantizes them.

Prompts are token ids, made with each model's tokenizer: the tokenizers have tests of their own.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from octavo.base.gguf import BLOCK_TYPES, GGUFFile
from octavo.runtime.models.interface import Model
from tests.gguf_models import read_gguf
from tests.gguf_writer import BOOL, FLOAT32, STRING, UINT32, Tensor, gguf_bytes
from tests.model_driver import greedy, load, prompt_logits
from tests.tiny_models import oracle_greedy, oracle_logits

SMOLLM2_PROMPTS = [
    [504, 3575, 282, 4649, 314],  # The capital of France is
    [6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 3426, 28],  # Once upon a time, in a small …
    [1604, 3987, 46477, 24, 94, 727, 198],  # def fibonacci(n):
    [12615, 36411, 418, 253, 2779, 282],  # Water boils at a temperature of
    [504, 1296, 3003, 14797, 359],  # The three primary colours are
    [788, 216, 33, 41, 38, 41, 28, 27639, 24955],  # In 1969, Neil Armstrong
    [65, 42, 1812, 314, 216, 34, 1232, 216, 34, 47, 198, 49, 42],  # Q: What is 2 + 2? A:
    [66, 4243, 359, 2382, 28, 386, 1119, 6770, 359],  # Roses are red, violets are
    [42703, 407, 603, 437, 36192, 12673, 45365, 1219, 43424],  # Die Hauptstadt von Deutschland ist
    [49, 1398, 282, 5574, 42, 11977, 28, 21285, 28],  # A list of fruits: apple, banana,
]
GEMMA3_PROMPTS = [  # the same texts, each after <bos>
    [2, 818, 5279, 529, 7001, 563],
    [2, 14946, 3324, 496, 990, 236764, 528, 496, 1944, 9744, 684, 506, 5442, 236764],
    [2, 2063, 10779, 78113, 236769, 236749, 1473, 107],
    [2, 17390, 104264, 657, 496, 4022, 529],
    [2, 818, 1806, 5905, 22640, 659],
    [2, 902, 236743, 236770, 236819, 236825, 236819, 236764, 39022, 47422],
    [2, 236935, 236787, 2900, 563, 236743, 236778, 900, 236743, 236778, 236881, 107, 236776, 236787],
    [2, 205251, 659, 2604, 236764, 81758, 8524, 659],
    [2, 13034, 229912, 3564, 41160, 3526],
    [2, 236776, 1694, 529, 16391, 236787, 17810, 236764, 30077, 236764],
]
# What is the capital of France?, in SmolLM2's chat template
CHAT_PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
CHAT_PROMPT += [19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260]
CHAT_PROMPT += [3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS = 7042

NUM_TOKENS = 16
TOLERANCE = 2e-3
"""Of logits around 20: float32 sums in another order."""


class Pair(NamedTuple):
    model: Model
    oracle: PreTrainedModel
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request, tmp_path_factory) -> Pair:
    path = request.getfixturevalue(f"{request.param}_path")
    prompts = SMOLLM2_PROMPTS if request.param == "smollm2" else GEMMA3_PROMPTS
    oracle = load_oracle(path, tmp_path_factory.mktemp(request.param))
    return Pair(load(path, dtype="bfloat16", max_model_len=2048), oracle, prompts)


def load_oracle(path: Path, folder: Path) -> PreTrainedModel:
    """Transformers' model, from a copy without the vocabulary, which its reader is slow at."""
    copy = folder / "model.gguf"
    copy.write_bytes(without_vocabulary(path))
    with no_init_weights():
        oracle = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=copy.name))
    read_gguf(oracle, copy)
    return oracle.eval()


def without_vocabulary(path: Path) -> bytes:
    """The file with the same tensors and a header without arrays."""
    file = GGUFFile(path)
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
    metadata = {k: v for k, v in file.metadata.items() if type(v) in kinds}
    architecture = metadata["general.architecture"]
    metadata.setdefault(f"{architecture}.vocab_size", len(file.metadata["tokenizer.ggml.tokens"]))
    type_ids = {kind: type_id for type_id, kind in BLOCK_TYPES.items()}
    rows, data = [], bytearray()
    for name, info in file.tensors.items():
        rows.append(Tensor(name, info.shape[::-1], type_ids[info.type], len(data)))
        data += file.data(name).tobytes()
        data += bytes(-len(data) % 32)
    return gguf_bytes([(k, kinds[type(v)], v) for k, v in metadata.items()], rows, bytes(data))


@pytest.mark.matrix
def test_logits(pair):
    prompts = pair.prompts[:4]
    for logits, prompt in zip(prompt_logits(pair.model, prompts), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(pair.oracle, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.matrix
def test_greedy_tokens(pair):
    outputs = greedy(pair.model, pair.prompts, NUM_TOKENS)
    for prompt, output in zip(pair.prompts, outputs, strict=True):
        assert output == oracle_greedy(pair.oracle, prompt, output)


def test_smollm2_knows_the_capital_of_france(smollm2_path):
    assert PARIS in greedy(load(smollm2_path), [CHAT_PROMPT], 10)[0]
