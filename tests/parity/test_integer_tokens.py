"""With activations in integers, too: the same tokens in every batch, chunk and number of threads."""

from pathlib import Path

import pytest
import torch

from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import load_model
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import get_platform
from tests.model_driver import engine_config, greedy, prompt_logits

PROMPTS = [list(range(100, 100 + n)) for n in (1, 2, 3, 9, 17, 40)]


def load(path: Path, threads: int, kind: str) -> Model:
    config = engine_config(path, activations=kind)
    return load_model(config, get_platform("cpu", threads), ParallelContext())


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["int8", "int16"])
def test_batch_chunk_and_threads_change_no_bit(smollm2_path: Path, kind: str) -> None:
    one, two = load(smollm2_path, 1, kind), load(smollm2_path, 2, kind)
    alone = [prompt_logits(one, [prompt])[0] for prompt in PROMPTS]
    for model, chunk in ((one, 0), (two, 0), (two, 1), (two, 7)):
        together = prompt_logits(model, PROMPTS, chunk)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)), chunk


def test_greedy_tokens_do_not_depend_on_company(smollm2_path: Path) -> None:
    model = load(smollm2_path, 2, "int16")
    assert greedy(model, PROMPTS[2:], 6) == [greedy(model, [prompt], 6)[0] for prompt in PROMPTS[2:]]
