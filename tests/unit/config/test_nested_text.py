"""Sizes that the text part of a checkpoint leaves out."""

import json

import pytest
from transformers import CONFIG_MAPPING

from octavo.config.checkpoint import read_checkpoint
from octavo.config.nested_text import TEXT_DEFAULTS


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_defaults_are_those_of_transformers(kind):
    defaults = CONFIG_MAPPING[kind]()
    assert TEXT_DEFAULTS[kind] == {name: getattr(defaults, name) for name in TEXT_DEFAULTS[kind]}


def test_what_is_said_stays(tmp_path):
    """As in the files of LLaVA 1.5 7B, which name the vocabulary and little else."""
    nested = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.vocab_size, checkpoint.embedding_size) == (32064, 4096)
    assert checkpoint.max_position_embeddings == 4096
    assert checkpoint.text_config["num_hidden_layers"] == 32


@pytest.mark.parametrize("nested", [None, {}, {"model_type": "unknown"}, {"model_type": ["llama"]}])
def test_others_stay_as_they_are(tmp_path, nested):
    config = {"text_config": nested, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(tmp_path).config == config
