"""The two real GGUF models against transformers' own dequantized loading of the same file."""

from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from octavo.runtime.models.interface import Model
from tests.model_driver import greedy, load, prompt_logits
from tests.tiny_models import oracle_greedy, oracle_logits

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three primary colours are",
    "In 1969, Neil Armstrong",
    "Q: What is 2 + 2?\nA:",
    "Roses are red, violets are",
    "Die Hauptstadt von Deutschland ist",
    "A list of fruits: apple, banana,",
)
NUM_TOKENS = 16
TOLERANCE = 2e-3
"""Of logits around 20: float32 sums in another order, over dequantized products."""


class Pair(NamedTuple):
    model: Model
    oracle: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    bos: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        return [*self.bos, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.fixture(scope="module", params=["smollm2_path", "gemma3_path"])
def pair(request) -> Pair:
    path = request.getfixturevalue(request.param)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    bos = (2,) if request.param == "gemma3_path" else ()  # which transformers' conversion drops
    return Pair(load(path, dtype="bfloat16", max_model_len=2048), oracle.eval(), tokenizer, bos)


def test_logits(pair):
    prompts = [pair.encode(text) for text in PROMPTS[:4]]
    for logits, prompt in zip(prompt_logits(pair.model, prompts), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(pair.oracle, prompt), atol=TOLERANCE, rtol=1e-3)


def test_greedy_texts(pair):
    prompts = [pair.encode(text) for text in PROMPTS]
    outputs = greedy(pair.model, prompts, NUM_TOKENS)
    texts = [pair.tokenizer.decode(output) for output in outputs]
    expected = [pair.tokenizer.decode(oracle_greedy(pair.oracle, p, NUM_TOKENS)) for p in prompts]
    assert texts == expected


def test_smollm2_knows_the_capital_of_france(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert "Paris" in tokenizer.decode(greedy(load(smollm2_path), [prompt], 10)[0])
