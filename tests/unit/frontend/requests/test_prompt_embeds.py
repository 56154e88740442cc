"""Prompts as embeddings: reading, checks at admission, the way through a message."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from octavo.base.errors import PromptTooLong, RequestError
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.prompt_embeds import read_prompt_embeds
from octavo.messages.request import EngineRequest
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer, fake_config, options

WIDTH = 6
ROWS = np.arange(5 * WIDTH, dtype=np.float32).reshape(5, WIDTH) / 8


def processor(*, enabled=True, width=WIDTH):
    config = fake_config()
    return InputProcessor(
        replace(
            config,
            model=replace(config.model, enable_prompt_embeds=enabled),
            checkpoint=replace(config.checkpoint, config={"vocab_size": 300, "n_embd": width}),
        ),
        ByteTokenizer(),
    )


@pytest.mark.parametrize(
    "value",
    [
        ROWS,
        ROWS[None],
        ROWS.astype(np.float64),
        ROWS.astype(np.float16),
        np.asfortranarray(ROWS),
        torch.from_numpy(ROWS.copy()),
        torch.from_numpy(ROWS.copy()).bfloat16(),
        torch.from_numpy(ROWS.copy()).requires_grad_(),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype}",
)
def test_every_form_gives_the_same_bytes(value):
    read = read_prompt_embeds(value)
    assert (read.num_tokens, read.width) == ROWS.shape
    assert read.message.data == ROWS.tobytes()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ROWS[0], r"shape \(seq_len, hidden_size\), got \(6,\)"),
        (np.stack([ROWS, ROWS]), r"got \(2, 5, 6\)"),
        (ROWS.astype(np.int64), "must hold floats, got int64"),
        (torch.ones(2, WIDTH, dtype=torch.long), "must hold floats, got torch.int64"),
        (torch.ones(2, WIDTH).to_sparse(), "must be dense, got a tensor of layout torch.sparse_coo"),
        (np.full((2, WIDTH), np.nan), "finite"),
        (np.full((2, WIDTH), np.inf), "finite"),
        (np.full((2, WIDTH), 1e300), "finite numbers, in the range of float32"),
        (ROWS.tolist(), "a torch tensor or a NumPy array, got list"),
        (b"x", "got bytes"),
    ],
    ids=range(10),
)
def test_what_is_no_prompt_is_refused(value, text):
    with pytest.raises(RequestError, match=text) as caught:
        read_prompt_embeds(value)
    assert caught.value.parameter == "prompt_embeds"


def test_the_engine_request():
    prepared = processor().process({"prompt_embeds": ROWS, "prompt": "text"}, SamplingParams(n=2))
    assert (prepared.prompt, prepared.prompt_token_ids) == ("text", [0] * 5)
    for request in prepared.engine_requests:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
        assert sent == request
        assert (sent.spec.embeds.data, sent.spec.embeds.width) == (ROWS.tobytes(), WIDTH)


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ({"prompt_embeds": ROWS[:, :5]}, {}, r"shape \(seq_len, 6\) for this model, got \(seq_len, 5\)"),
        ({"prompt_embeds": ROWS[:0]}, {}, "cannot be empty"),
        ({"prompt_embeds": ROWS, "prompt_token_ids": [1]}, {}, "not both"),
        ({"prompt_embeds": ROWS}, {"prompt_logprobs": 1}, "prompt_logprobs is not compatible"),
        ({"prompt_embeds": ROWS}, {"prompt_logprob_token_ids": [1]}, "token_ids is not compatible"),
    ],
    ids=range(5),
)
def test_refused_at_admission(prompt, params, text):
    with pytest.raises(RequestError, match=text):
        processor().process(prompt, SamplingParams(**params))


def test_length_truncation_and_the_option():
    with pytest.raises(PromptTooLong, match="64 input tokens"):
        processor().process({"prompt_embeds": np.zeros((64, WIDTH), np.float32)})
    with pytest.raises(RequestError, match="give fewer rows"):
        processor().process(
            {"prompt_embeds": ROWS}, options=options(tokenization_kwargs={"truncate_prompt_tokens": 2})
        )
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        processor(enabled=False).process({"prompt_embeds": ROWS})
