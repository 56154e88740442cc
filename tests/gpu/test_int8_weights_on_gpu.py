"""quantization="int8" on a GPU: weights packed there while they are loaded, against the same on CPU."""

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.model_driver import load, prompt_logits
from tests.parity.test_int8_weights import SIZES
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = pytest.mark.gpu


def test_packed_weights_on_gpu(tmp_path):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | SIZES)
    prompts = make_prompts(oracle.config.vocab_size)
    folder = save(oracle, tmp_path / "folder")
    found = prompt_logits(load(folder, quantization="int8", device="cuda"), prompts)
    for ours, expected in zip(found, prompt_logits(load(folder, quantization="int8"), prompts), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    options = {"quantization": "int8", "dtype": "bfloat16", "gpu_memory_utilization": 0.1}
    work = [{"prompt_token_ids": prompt} for prompt in prompts]
    wanted = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    texts = []
    for eager in (True, False):
        with LLM(str(folder), skip_tokenizer_init=True, enforce_eager=eager, **options) as llm:
            outputs = llm.generate(work, wanted, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
