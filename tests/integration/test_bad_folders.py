"""Model folders that are damaged: each refused while it is loaded, with one line that says what is wrong.

`octavo serve` turns these errors into exit code 3; a real process shows it for one fault of each stage.
"""

import json
import shutil
import struct

import pytest

from octavo import LLM
from octavo.base.errors import BadCheckpoint, Unsupported
from tests.fakes import ByteTokenizer
from tests.served_process import ServeProcess
from tests.tiny_models import make_oracle, save, tiny_config

OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 50}
CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Two shards, a tokenizer, a config: it loads."""
    config = tiny_config("LlamaForCausalLM") | {"vocab_size": 512}
    folder = save(make_oracle(config), tmp_path_factory.mktemp("good"), max_shard_size="100KB")
    (folder / TOKENIZER).write_text(ByteTokenizer()._backend.to_str())
    with LLM(str(folder), **OPTIONS):
        pass
    assert len(shards(folder)) >= 2
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def first_shard(folder):
    return shards(folder)[0]


def on_bytes(change):
    """The first shard's bytes, changed."""

    def mutate(folder):
        first_shard(folder).write_bytes(change(first_shard(folder).read_bytes()))

    return mutate


def on_header(change):
    """The first shard's header, changed; its length in front fits."""

    def rewrite(data):
        [size] = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        name = next(name for name in header if name != "__metadata__")
        new = change(header, name)
        content = json.dumps(header if new is None else new).encode()
        return struct.pack("<Q", len(content)) + content + data[8 + size :]

    return on_bytes(rewrite)


def on_json(file, change):
    """A JSON file, changed."""

    def mutate(folder):
        content = json.loads((folder / file).read_text())
        new = change(content)
        (folder / file).write_text(json.dumps(content if new is None else new))

    return mutate


def text(file, content):
    """A file's content, replaced."""
    return lambda folder: (folder / file).write_text(content)


def setting(**fields):
    return on_json(CONFIG, lambda config: config.update(fields))


def tensor(**fields):
    return on_header(lambda header, name: header[name].update(fields))


def other_file(name):
    return on_json(INDEX, lambda index: index["weight_map"].update({next(iter(index["weight_map"])): name}))


FAULTS = {
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "a config that is empty": text(CONFIG, ""),
    "a config that is cut": text(CONFIG, '{"architectures": ["Llama'),
    "a config that is a list": text(CONFIG, "[]"),
    "a config that is not UTF-8": lambda folder: (folder / CONFIG).write_bytes(b'{"a": "\xff"}'),
    "a config of an unknown architecture": setting(architectures=["NobodyForCausalLM"], model_type="nobody"),
    "no architecture": setting(architectures=None, model_type=None),
    "no number of layers": on_json(CONFIG, lambda config: config.pop("num_hidden_layers") and None),
    "negative sizes": setting(hidden_size=-64),
    "no heads": setting(num_attention_heads=0),
    "heads that do not divide": setting(num_attention_heads=7, head_dim=None),
    "a size that is a text": setting(intermediate_size="many"),
    "another number of layers": setting(num_hidden_layers=99),
    "another width": setting(hidden_size=128),
    "another vocabulary": setting(vocab_size=1024),
    "an unknown rope": setting(rope_parameters={"rope_type": "spiral"}, rope_scaling={"rope_type": "spiral"}),
    "an unknown quantization": setting(quantization_config={"quant_method": "magic"}),
    "no weights": lambda folder: [path.unlink() for path in shards(folder)] and None,
    "a missing shard": lambda folder: shards(folder)[1].unlink(),
    "an empty shard": on_bytes(lambda data: b""),
    "a shard of seven bytes": on_bytes(lambda data: data[:7]),
    "a shard that ends in its header": on_bytes(lambda data: data[:40]),
    "a shard that ends in its data": on_bytes(lambda data: data[:-10]),
    "a header of 2^63 bytes": on_bytes(lambda data: b"\xff" * 7 + b"\x7f" + data[8:]),
    "a header of no bytes": on_bytes(lambda data: b"\0" * 8 + data[8:]),
    "a header that is no JSON": on_bytes(lambda data: data[:8] + b"#" + data[9:]),
    "a flipped bit in the header": on_bytes(lambda data: data[:20] + bytes([data[20] ^ 128]) + data[21:]),
    "a header that is a list": on_header(lambda header, name: []),
    "offsets behind the file": tensor(data_offsets=[0, 2**40]),
    "offsets that run back": tensor(data_offsets=[100, 0]),
    "negative offsets": tensor(data_offsets=[-8, 8]),
    "offsets that overlap": on_header(
        lambda header, name: [entry.update(data_offsets=[0, 4]) for entry in header.values()] and None
    ),
    "a shape that is too large": tensor(shape=[2**40, 2**40]),
    "a shape of the same size, but another": on_header(
        lambda header, name: header[name].update(shape=[*reversed(header[name]["shape"]), 1])
    ),
    "an unknown type": tensor(dtype="F99"),
    "a type of another size": tensor(dtype="F64"),
    "a tensor of another name": on_header(lambda header, name: header.update({"x": header.pop(name)})),
    "an index that is no JSON": text(INDEX, "{"),
    "an index without a map": text(INDEX, "{}"),
    "an index that names an absent file": other_file("model-00009-of-00009.safetensors"),
    "an index that names a file elsewhere": other_file("../../etc/passwd"),
    "an index that names the config": other_file(CONFIG),
    "pickled weights": lambda folder: (
        [path.rename(path.with_suffix(".bin")) for path in [*shards(folder), folder / INDEX]] and None
    ),
    "no tokenizer": lambda folder: (folder / TOKENIZER).unlink(),
    "a tokenizer that is cut": text(TOKENIZER, '{"version": "1.0", "model": {"type": "BPE", "vo'),
    "a tokenizer of an unknown kind": text(TOKENIZER, '{"version": "1.0", "model": {"type": "Magic"}}'),
    "a tokenizer that is a list": text(TOKENIZER, "[]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder(folder, fault):
    FAULTS[fault](folder)
    with pytest.raises((BadCheckpoint, Unsupported)) as caught, LLM(str(folder), **OPTIONS):
        pass
    message = str(caught.value)
    assert "\n" not in message and 20 < len(message) < 1000, message


@pytest.mark.parametrize("fault", ["a tokenizer that is cut", "a shard that ends in its data"])
def test_the_server_ends_with_one_line(folder, fault):
    FAULTS[fault](folder)
    program = ["-m", "octavo", "serve", str(folder), "--dtype", "float32"]
    with ServeProcess("--num-gpu-blocks-override", "50", program=program, wait=False) as server:
        assert server.end() == 3, server.log
        told = [line for line in server.log.splitlines() if line.startswith("octavo: error: ")]
        assert len(told) == 1 and len(told[0]) < 1000, server.log
        assert server.log.endswith(f"{told[0]}\n"), server.log
