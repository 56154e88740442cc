import json

import pytest

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.checkpoint import Checkpoint, read_checkpoint
from tests.gguf_writer import FLOAT32, LLAMA_ENTRIES, STRING, UINT32, gguf_bytes


def _folder(path, files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, encoding="utf-8")
    return path


def test_a_safetensors_folder(tmp_path):
    files = {
        "config.json": {"architectures": ["X"], "vocab_size": 7, "max_position_embeddings": 9},
        "generation_config.json": {"temperature": 0.6},
        "model.safetensors": "",
    }
    checkpoint = read_checkpoint(_folder(tmp_path, files), {"vocab_size": 8})
    assert (checkpoint.format, checkpoint.architecture) == ("safetensors", "X")
    assert (checkpoint.vocab_size, checkpoint.max_position_embeddings) == (8, 9)
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert checkpoint.path == str(tmp_path)


def test_a_gguf_file_alone_or_in_a_folder(tmp_path):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(LLAMA_ENTRIES))
    for path in (tmp_path, tmp_path / "m.gguf"):
        checkpoint = read_checkpoint(path)
        assert (checkpoint.format, checkpoint.path) == ("gguf", str(tmp_path / "m.gguf"))
        assert (checkpoint.architecture, checkpoint.vocab_size) == ("LlamaForCausalLM", 4)
        assert checkpoint.generation_config == {"eos_token_id": 1}
        assert checkpoint.max_position_embeddings == 512


def test_a_gguf_file_says_how_to_sample_it(tmp_path):
    """In llama.cpp's words (gguf.Keys.General.SAMPLING_*); what is not a number is refused."""
    stated = [("temp", FLOAT32, 0.5), ("top_k", UINT32, 20), ("penalty_repeat", FLOAT32, 1.25)]
    entries = [(f"general.sampling.{key}", kind, value) for key, kind, value in stated]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([*LLAMA_ENTRIES, *entries]))
    generation = read_checkpoint(tmp_path).generation_config
    assert generation == {"eos_token_id": 1, "temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([*LLAMA_ENTRIES, ("general.sampling.temp", STRING, "hot")]))
    with pytest.raises(BadCheckpoint, match=r"general\.sampling\.temp is 'hot'; need a number from 0"):
        read_checkpoint(tmp_path)


def test_the_default_model_describes_itself(smollm2_path):
    checkpoint = read_checkpoint(smollm2_path)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert (checkpoint.vocab_size, checkpoint.config["num_hidden_layers"]) == (49152, 30)


def test_gemma3_alternates_local_and_global_layers(gemma3_path):
    config = read_checkpoint(gemma3_path).config
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 18
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert config["sliding_window"] == 512


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickled_weights_are_refused(tmp_path, suffix):
    _folder(tmp_path, {"config.json": {}, f"weights{suffix}": ""})
    with pytest.raises(Unsupported, match="pickled weights can run code and are never loaded"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "neither config.json nor a GGUF file"),
        ({"a.gguf": "", "b.gguf": ""}, "holds 2 GGUF files; name one: a.gguf, b.gguf"),
        ({"a.gguf": "x"}, "shorter than its header"),
        ({"config.json": "[1]"}, "must hold a JSON object, found list"),
        ({"config.json": "nonsense"}, "cannot be read as JSON"),
        ({"config.json": "[" * 100_000}, "cannot be read as JSON"),
        ({"config.json": {}, "generation_config.json": "no"}, "generation_config.json cannot be read"),
    ],
)
def test_damaged_models_are_refused(tmp_path, files, says):
    with pytest.raises(BadCheckpoint, match=says):
        read_checkpoint(_folder(tmp_path, files))


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": 5}])
def test_a_config_may_name_no_architecture(config):
    assert Checkpoint(path="p", format="none", config=config).architecture == "unknown"


@pytest.mark.parametrize("size", [None, 0, "100", 1.5])
def test_a_vocabulary_size_is_needed(size):
    with pytest.raises(BadCheckpoint, match="vocab_size is"):
        _ = Checkpoint(path="p", format="none", config={"vocab_size": size}).vocab_size


def test_the_text_part_of_a_config_counts():
    config = {"text_config": {"vocab_size": 5, "n_positions": 33}, "vocab_size": 1}
    checkpoint = Checkpoint(path="p", format="none", config=config)
    assert (checkpoint.vocab_size, checkpoint.max_position_embeddings) == (5, 33)
    assert Checkpoint(path="p", format="none", config={}).max_position_embeddings == 2048


def test_unknown_gguf_architectures_list_the_known(tmp_path):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("general.architecture", STRING, "rwkv")]))
    with pytest.raises(Unsupported, match=r"'rwkv' is not supported\. Supported: bert, deepseek2, gemma, "):
        read_checkpoint(tmp_path)
