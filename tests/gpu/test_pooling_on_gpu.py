"""Encoders and causal embedders on a GPU against Hugging Face on the CPU: float32 closely, bf16 by cosine."""

import numpy as np
import pytest
import torch
import transformers

from octavo import LLM
from tests.parity.test_tiny_encoders import KINDS, expected, prompts_of
from tests.tiny_encoders import make_encoder, save

pytestmark = pytest.mark.gpu


def vectors(folder, prompts, dtype, mode, **options):
    pooler = {"pooling_type": mode}
    with LLM(str(folder), device="cuda", dtype=dtype, pooler_config=pooler, **options) as llm:
        return np.array([out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False)])


@pytest.mark.parametrize("name", KINDS)
def test_encoders_on_gpu(tmp_path, name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    oracle = make_encoder(getattr(transformers, name), name)
    folder, prompts = save(oracle, tmp_path), prompts_of(oracle)
    wanted = expected(oracle, prompts)
    assert np.abs(vectors(folder, prompts, "float32", "MEAN") - wanted).max() <= 1e-4
    assert (vectors(folder, prompts, "bfloat16", "MEAN") * wanted).sum(1).min() >= 0.99


def test_a_causal_embedder_on_gpu(tmp_path):
    changes = {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": None}
    oracle = make_encoder(transformers.LlamaForCausalLM, "BertModel", **changes)
    folder, prompts = save(oracle, tmp_path), prompts_of(oracle)
    with torch.no_grad():
        states = [oracle.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    wanted = torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()
    found = vectors(folder, prompts, "float32", "LAST", runner="pooling")
    assert np.abs(found - wanted).max() <= 1e-4
    chunked = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
    again = vectors(folder, prompts, "float32", "LAST", runner="pooling", **chunked)
    assert np.abs(again - wanted).max() <= 1e-4
