"""Embeddings over HTTP in torch's form: the tensor, or an error, and nothing is run."""

import base64
import io
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import RequestError
from octavo.frontend.media.embeds_file import read_embeds


def saved(tensor):
    """As torch.save writes it, in base64."""
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_torch_are_read(dtype):
    rows = torch.arange(60).reshape(5, 12).to(dtype) / 7
    for tensor in (rows, rows[None], rows.t(), rows[1:3, 2:4]):
        expected = tensor.reshape(tensor.shape[-2:]).float().numpy()
        assert np.array_equal(read_embeds(saved(tensor)), expected)


PLAIN = torch.ones(2, 2)


@pytest.mark.parametrize("value", [[1, 2], {"a": PLAIN}, PLAIN.long(), torch.ones(3), str], ids=str)
def test_nothing_but_a_tensor_is_read(value):
    with pytest.raises(RequestError, match="torch"):
        read_embeds(saved(value))


@given(st.data())
def test_damaged_tensors_are_refused(data):
    """By an error of ours, or they are read as other numbers."""
    content = bytearray(base64.b64decode(saved(torch.ones(2, 3))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RequestError):
        assert read_embeds(base64.b64encode(bytes(content)).decode()).ndim == 2


def test_a_tensor_with_a_password_is_refused():
    content = bytearray(base64.b64decode(saved(torch.ones(2, 3))))
    content[content.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(RequestError):
        read_embeds(base64.b64encode(bytes(content)).decode())
