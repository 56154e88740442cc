"""A plan of memory against what a GPU then says, and blocks that a GPU's engine leaves for the next one."""

import json

import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.runtime.worker.memory_forecast import GPU_CONTEXT_BYTES, forecast
from octavo.runtime.worker.worker import Worker
from tests.integration.test_shared_storage import (
    make_engine,
    test_a_second_engine_finds_what_the_first_computed,
)
from tests.tiny_models import tiny_config

__all__ = ["make_engine", "test_a_second_engine_finds_what_the_first_computed"]
pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
}


def test_the_plan_holds(tmp_path):
    """Weights to the byte; the rest within a tenth: kernels keep little memory that no tensor shows."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("LlamaForCausalLM") | SIZES))
    config = resolve(EngineArgs(model=str(tmp_path), load_format="dummy", dtype="bfloat16"))
    told = forecast(config)
    worker = Worker(config)
    found = worker.load()
    _, total = torch.cuda.mem_get_info()
    worker.close()
    assert told.ready.weight_bytes == found.weight_bytes
    assert told.ready.workspace_bytes == pytest.approx(found.workspace_bytes, rel=0.1)
    assert told.ready.available_bytes == pytest.approx(found.available_bytes, rel=0.02)
    elsewhere = forecast(config, total).ready.available_bytes
    assert elsewhere == pytest.approx(found.available_bytes, rel=0.02), GPU_CONTEXT_BYTES
