"""Random damage to the files of a model folder: it loads, or is refused by an error of ours.

OCTAVO_FOLDER_SEEDS=2000 tries as many.
"""

import json
import os
import random
import shutil
import struct

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from tests.fakes import ByteTokenizer
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.matrix(3)

NUM_SEEDS = int(os.environ.get("OCTAVO_FOLDER_SEEDS", "60"))
DEEP = "[" * 100_000 + "]" * 100_000
NASTY = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**40, 2**63, 10**400, 1.5, float("nan"), float("inf"), 1e308),
    *("", "x", "\ud800", "a" * 100_000, [], [1, 2, 3], [[]], ["x"], {}, {"a": 1}, {"type": "x"}, DEEP),
]
JSON_FILES = (
    *("config.json", "config.json", "config.json", "generation_config.json", "tokenizer_config.json"),
    *("tokenizer.json", "model.safetensors.index.json", "shard"),
)
ADDED = {
    "config.json": (
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "layer_types",
        "sliding_window",
        "head_dim",
    ),
    "generation_config.json": ("eos_token_id", "temperature", "top_k", "stop_strings"),
    "tokenizer_config.json": ("chat_template", "eos_token", "added_tokens_decoder", "add_bos_token"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    config = tiny_config("LlamaForCausalLM") | {"vocab_size": 512}
    folder = save(make_oracle(config), tmp_path_factory.mktemp("good"), max_shard_size="100KB")
    (folder / "tokenizer.json").write_text(ByteTokenizer()._backend.to_str())
    content = {
        "chat_template": ByteTokenizer.CHAT_TEMPLATE,
        "eos_token": "</s>",
        "bos_token": {"content": "<s>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257], "temperature": 0.5}))
    return folder


def places(value):
    """Every container with a key of it."""
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


def damage(rng, name, content):
    """The text of a JSON file, one thing in it changed; what was changed."""
    container, key = rng.choice(places(content) or [(content, "x")])
    if rng.random() < 0.4 and name in ADDED:
        container, key = content, rng.choice(ADDED[name])
    new = rng.choice(NASTY)
    if rng.random() < 0.1:
        container.pop(key) if isinstance(container, dict) and key in container else None
        return json.dumps(content), f"{name}: no {key}"
    container[key] = "DEEP" if new is DEEP else new
    return json.dumps(content).replace('"DEEP"', DEEP), f"{name}: {key} = {str(new)[:50]}"


def mutate(rng, folder):
    """Change one thing in one file; returns what."""
    name = rng.choice(JSON_FILES)
    if name != "shard":
        path = folder / name
        text, what = damage(rng, name, json.loads(path.read_text()))
        path.write_text(text)
        return what
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = path.read_bytes()
    [size] = struct.unpack("<Q", data[:8])
    text, what = damage(rng, name, json.loads(data[8 : 8 + size]))
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + data[8 + size :])
    return what


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_damaged_folder_loads_or_is_refused(good, tmp_path, seed):
    folder = shutil.copytree(good, tmp_path / "model")
    what = mutate(random.Random(seed), folder)
    try:
        with LLM(str(folder), dtype="float32", num_gpu_blocks_override=50, cpu_threads=1) as llm:
            llm.generate("hi", SamplingParams(max_tokens=2), use_tqdm=False)
            llm.generate("hi", use_tqdm=False)
            llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2), use_tqdm=False)
    except OctavoError as error:
        assert str(error) and "\n" not in str(error)[:200], what
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}"[:500])
