"""With int8 activations too, a request gets the same tokens in every batch, chunk and number of threads."""

from pathlib import Path

import torch

from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import load_model
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import get_platform
from tests.model_driver import engine_config, greedy, prompt_logits

PROMPTS = [list(range(100, 100 + n)) for n in (1, 2, 3, 9, 17, 40)]


def load_int8(path: Path, threads: int) -> Model:
    config = engine_config(path, activations="int8")
    return load_model(config, get_platform("cpu", threads), ParallelContext())


def test_batch_chunk_and_threads_change_no_bit(smollm2_path: Path) -> None:
    one, two = load_int8(smollm2_path, 1), load_int8(smollm2_path, 2)
    alone = [prompt_logits(one, [prompt])[0] for prompt in PROMPTS]
    for model, chunk in ((one, 0), (two, 0), (two, 1), (two, 7)):
        together = prompt_logits(model, PROMPTS, chunk)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)), chunk


def test_greedy_tokens_do_not_depend_on_company(smollm2_path: Path) -> None:
    model = load_int8(smollm2_path, 2)
    assert greedy(model, PROMPTS[2:], 6) == [greedy(model, [prompt], 6)[0] for prompt in PROMPTS[2:]]
