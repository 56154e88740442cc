"""Images beside captured steps, as a GPU computes them; on a CPU a stand-in repeats the step."""

import pytest

from octavo import SamplingParams
from tests.integration.test_cuda_graphs import repeats, shapes
from tests.parity.test_media_models import STATE, WORDS, make_llm, make_requests

__all__ = ["repeats", "shapes"]
QWEN, GEMMA = "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, allowed_token_ids=WORDS)


def tokens(llm, architecture):
    requests = [*make_requests(architecture, (1, 2, 3, 1)), {"prompt_token_ids": WORDS[:30]}]
    outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("architecture", [QWEN, GEMMA])
@pytest.mark.parametrize(
    "options", [{}, {"long_prefill_token_threshold": 12, "max_num_seqs": 3}], ids=["whole", "chunks"]
)
def test_captured_equals_eager(architecture, options, repeats, shapes):
    """Decoding behind images is captured, beside a request of text alone; so are chunks without images."""
    expected = tokens(make_llm(architecture, enforce_eager=True), architecture)
    llm = make_llm(architecture, **options)
    shapes.clear()
    assert tokens(llm, architecture) == expected
    assert len(shapes) > 12 and repeats[0] > 12


def test_positions_that_go_on_by_one_show(repeats, monkeypatch):
    """The twin: decoding steps that know nothing of what rows and columns have saved."""
    expected = tokens(make_llm(QWEN, enforce_eager=True), QWEN)
    monkeypatch.setattr(f"{STATE}.rope_positions", lambda state, rows, positions: positions)
    assert tokens(make_llm(QWEN), QWEN) != expected
