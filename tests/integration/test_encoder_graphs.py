"""Encoders of images by graphs, as a GPU captures them; on a CPU a stand-in repeats the launches."""

import numpy as np
import pytest
from PIL import Image

from octavo.lora.request import LoRARequest
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker import encoder_graphs
from octavo.runtime.worker.replayer import Eager
from octavo.runtime.worker.worker import Worker
from tests import handmade_adapters
from tests.integration.test_cuda_graphs import repeats
from tests.parity.test_media_models import (
    FAMILIES,
    PARAMS,
    TINY_MEDIA,
    TOLERANCE,
    differences,
    make_llm,
    make_prompt,
    oracle_of,
)

__all__ = ["repeats"]
QWENS = [f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")]


@pytest.fixture
def sent(monkeypatch):
    """How often something was sent to the device for an encoder."""
    count, send = [0], encoder_graphs.send

    def counted(*arguments):
        count[0] += 1
        return send(*arguments)

    monkeypatch.setattr(encoder_graphs, "send", counted)
    return count


def request_of(architecture, seed, sizes=((90, 130),)):
    tiny, rng = TINY_MEDIA[architecture], np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 255, (*size, 3), np.uint8)) for size in sizes]
    ids = make_prompt(len(sizes), seed, tiny.marker, around=tiny.around)
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def difference(llm, architecture, request):
    return max(differences(architecture, [request], llm.generate([request], PARAMS, use_tqdm=False)))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_sizes_that_come_again_are_captured(architecture, repeats, sent):
    """New images of the same sizes, in turn with others, and after the weights were away; nothing is sent."""
    with make_llm(architecture, enable_sleep_mode=True) as llm:
        for seed in range(4):
            other = request_of(architecture, 10 + seed, ((60 + 30 * seed, 90), (90, 130)))
            assert difference(llm, architecture, other) <= TOLERANCE
            so_far = sent[0]
            assert difference(llm, architecture, request_of(architecture, seed)) <= TOLERANCE
            assert sent[0] == so_far + (seed == 0)
        llm.sleep()
        llm.wake_up()
        assert difference(llm, architecture, request_of(architecture, 4)) <= TOLERANCE
        assert sent[0] == so_far + 1


def test_a_graph_that_is_not_replayed_shows(monkeypatch):
    """The twin: the third image gets what became of the second."""
    [_, architecture, _] = QWENS

    def once(work):
        left = [work]
        return lambda: left.pop()() if left else None

    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda self: once)
    monkeypatch.setattr(
        Worker, "_make_graphs", lambda worker, runner, *rest: Eager(*rest[:3], batch_invariant=True)
    )
    with make_llm(architecture) as llm:
        found = [difference(llm, architecture, request_of(architecture, seed)) for seed in range(3)]
    assert max(found[:2]) <= TOLERANCE < found[2]


def test_batches_with_adapters_are_no_replays(repeats, tmp_path):
    """Of a size that is captured, and beside the base's images of that size."""
    architecture = "LlavaForConditionalGeneration"
    merged = handmade_adapters.write(oracle_of(architecture)[0], tmp_path / "adapter", 4, 0)
    lora = LoRARequest("a", 1, str(tmp_path / "adapter"))
    llm, owners = make_llm(architecture, enable_lora=True), [None, None, None, lora, None, lora]
    for seed, owner in enumerate(owners):
        request = request_of(architecture, seed)
        outputs = llm.generate([request], PARAMS, lora_request=owner, use_tqdm=False)
        model = merged if owner else None
        assert max(differences(architecture, [request], outputs, model)) <= TOLERANCE
