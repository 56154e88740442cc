import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.gguf import GGUFFile, open_gguf
from octavo.config.gguf_config import config_from_gguf
from tests.gguf_writer import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    LLAMA_ENTRIES,
    STRING,
    UINT32,
    UINT64,
    Tensor,
    gguf_bytes,
)

F32, Q4_0, Q8_0 = 0, 2, 8
WHOLE = gguf_bytes(
    [*LLAMA_ENTRIES, ("flags", ARRAY, (BOOL, [True, False])), ("big", UINT64, 2**40), ("odd", INT32, -7)],
    [Tensor("a", (4, 3), F32, 0), Tensor("b", (64, 2), Q8_0, 64), Tensor("c", (32,), Q4_0, 224)],
    bytes(range(256)),
)


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_an_open_file_is_shared_until_it_changes(write):
    path = write(WHOLE)
    first = open_gguf(path)
    assert open_gguf(path) is first
    write(WHOLE + bytes(32))
    assert open_gguf(path) is not first


def test_reads_metadata_and_tensors(write):
    file = GGUFFile(write(WHOLE))
    assert file.metadata["llama.embedding_length"] == 64
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "</s>", "a", "b"]
    assert file.metadata["flags"] == [True, False]
    assert (file.metadata["big"], file.metadata["odd"]) == (2**40, -7)
    assert {name: info.shape for name, info in file.tensors.items()} == {
        "a": (3, 4),
        "b": (2, 64),
        "c": (32,),
    }
    expected = np.frombuffer(bytes(range(48)), np.uint8).reshape(3, 16)
    assert np.array_equal(file.data("a"), expected)
    assert file.data("b").shape == (2, 68)
    assert file.data("b")[0, 0] == 64
    file.data("a")[:] = 0
    assert file.path.read_bytes() == WHOLE, "writing to the mapped bytes must not reach the file"


def test_agrees_with_the_gguf_package(tmp_path):
    gguf = pytest.importorskip("gguf")
    path, noise = tmp_path / "written.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(5e5)
    writer.add_token_list(["<s>", "ä", "€"])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    arrays = {"f32": noise.standard_normal((3, 5), np.float32), "f16": np.ones((2, 7), np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        arrays[name] = gguf.quantize(noise.standard_normal((4, 64), np.float32), kind)
        writer.add_tensor(name, arrays[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.rope.freq_base"] == 5e5
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "ä", "€"]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert {n: info.type.name for n, info in file.tensors.items()} == {n: n.upper() for n in arrays}
    for name, array in arrays.items():
        assert file.tensors[name].shape == ((4, 64) if name[0] == "Q" else array.shape)
        assert file.data(name).tobytes() == array.tobytes()


def test_reads_the_default_model_fast(smollm2_path):
    begun = time.monotonic()
    file = GGUFFile(smollm2_path)
    assert time.monotonic() - begun < 2
    assert file.metadata["general.architecture"] == "llama"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.tensors) == 272


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "shorter than its header"),
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (gguf_bytes(version=1), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "more entries than the file can hold"),
        (gguf_bytes([("k", UINT32, 1), ("k", UINT32, 2)]), "'k' stands twice"),
        (gguf_bytes([("general.alignment", UINT32, 0)]), "general.alignment is 0"),
        (gguf_bytes([("general.alignment", ARRAY, (UINT32, [32]))]), "general.alignment is"),
        (gguf_bytes([], [Tensor("t", (4,), F32, 0)] * 2, bytes(64)), "'t' stands twice"),
        (gguf_bytes([], [Tensor("t", (), F32, 0)], bytes(64)), "0 axes"),
        (gguf_bytes([], [Tensor("t", (1,) * 5, F32, 0)], bytes(64)), "5 axes"),
        (gguf_bytes([], [Tensor("t", (4,), 99, 0)], bytes(64)), "type 99; supported: F32"),
        (gguf_bytes([], [Tensor("t", (33,), Q4_0, 0)], bytes(64)), "does not fill Q4_0 blocks"),
        (gguf_bytes([], [Tensor("t", (0, 4), F32, 0)], bytes(64)), "does not fill F32 blocks"),
        (gguf_bytes([], [Tensor("t", (2**62, 2**62), F32, 0)], bytes(64)), "truncated file"),
        (gguf_bytes([], [Tensor("t", (4,), F32, 2**63)], bytes(64)), "truncated file"),
        (
            gguf_bytes([], [Tensor("t", (8,), F32, 0), Tensor("u", (8,), F32, 16)], bytes(64)),
            "'t' and 'u' overlap",
        ),
    ],
)
def test_refuses(content, says, write):
    with pytest.raises(BadCheckpoint, match=says):
        GGUFFile(write(content))


def _read(path):
    """Open and translate; the only errors allowed are ours."""
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            assert file.data(name).nbytes == file.tensors[name].num_bytes
        config_from_gguf(file)
    except (BadCheckpoint, Unsupported):
        pass


def test_translates_every_value_or_refuses(write):
    for key, _, _ in LLAMA_ENTRIES[1:8]:
        for wrong in [(STRING, "x"), (BOOL, True), (INT32, -1), (UINT64, 2**63), (ARRAY, (UINT32, [1]))]:
            entries = [(k, *wrong) if k == key else (k, kind, v) for k, kind, v in LLAMA_ENTRIES]
            with pytest.raises(BadCheckpoint, match=key):
                config_from_gguf(GGUFFile(write(gguf_bytes(entries))))
    huge = [(k, kind, 2**31 if k == "llama.block_count" else v) for k, kind, v in LLAMA_ENTRIES]
    with pytest.raises(BadCheckpoint, match="10000 layers"):
        config_from_gguf(GGUFFile(write(gguf_bytes(huge))))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_only_raise_bad_checkpoint(data, tmp_path_factory):
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 9))
        how = data.draw(st.sampled_from(["byte", "length", "cut", "insert"]))
        if how == "byte":
            content[place] = data.draw(st.integers(0, 255))
        elif how == "length":
            content[place : place + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
        elif how == "insert":
            content[place:place] = data.draw(st.binary(max_size=16))
        else:
            del content[max(24, place) :]
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    path.write_bytes(bytes(content))
    _read(path)


@settings(max_examples=200, deadline=None)
@given(
    tensors=st.lists(
        st.builds(
            Tensor,
            name=st.text(max_size=4),
            shape=st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([1, 4, 32, 256]), max_size=6).map(
                tuple
            ),
            type_id=st.integers(0, 40),
            offset=st.integers(0, 2**64 - 1) | st.integers(0, 8).map(lambda i: i * 32),
        ),
        max_size=5,
    ),
    alignment=st.integers(0, 2**32 - 1),
)
def test_hostile_tensor_tables(tensors, alignment, tmp_path_factory):
    entries = [*LLAMA_ENTRIES, ("general.alignment", UINT32, alignment)]
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    path.write_bytes(gguf_bytes(entries, tensors, bytes(512)))
    _read(path)


@pytest.mark.parametrize("item_type", [UINT32, FLOAT32, STRING, UINT64])
def test_a_huge_announced_length_allocates_nothing(item_type, write):
    content = gguf_bytes([("k", ARRAY, (item_type, []))])
    path = write(content[:-8].rstrip(b"\0") + struct.pack("<IQ", item_type, 2**62) + bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
