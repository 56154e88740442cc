"""Tiny random models, and engines that are closed again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo import LLM
from tests.tiny_models import make_oracle, save, tiny_config


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full attention only."""
    return save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding-window and full attention: several cache groups."""
    return save(make_oracle(tiny_config("Gemma3ForCausalLM")), tmp_path_factory.mktemp("tiny-gemma3"))


@pytest.fixture(params=["tiny_llama", "tiny_gemma3"])
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Each of the tiny models."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """LLM in float32 on token ids, closed at the end of the test."""
    opened: list[LLM] = []

    def make(path: Path, **options: object) -> LLM:
        defaults = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 400}
        opened.append(LLM(str(path), **(defaults | options)))
        return opened[-1]

    yield make
    for llm in opened:
        llm.shutdown()
