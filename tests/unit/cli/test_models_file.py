"""The file of `octavo serve --models` and the folder of --models-dir, and their faults by line."""

from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.cli.main import main
from octavo.cli.models_file import read_models

ROOT = Path(__file__).parents[3]
WHOLE = """\
max_loaded: 3
memory: 12GiB
load_timeout: 2m
defaults:
  max_model_len: 4k
models:
  small:
    model: smollm2
    aliases: [chat, gpt-4o-mini]
    preload: true
    ttl: 1h30m
    sleep_after: 60
    max-model-len: 8K
  vectors: minilm
  own: ./here.gguf
groups:
  tiny: [small, vectors]
  all: [tiny, own]
"""


@pytest.fixture
def read(tmp_path):
    def read(text, **options):
        path = tmp_path / "models.yaml"
        path.write_text(text, encoding="utf-8")
        return read_models(str(path), "", {"max_num_seqs": 7, **options})

    return read


def test_a_whole_file(read, tmp_path):
    (tmp_path / "here.gguf").touch()
    served = read(WHOLE)
    small, vectors, own = served.entries
    assert (served.max_loaded, served.memory_bytes, served.load_timeout_s) == (3, 12 << 30, 120)
    assert (small.name, small.aliases, small.preload) == ("small", ("chat", "gpt-4o-mini"), True)
    assert (small.ttl_s, small.sleep_after_s, vectors.ttl_s) == (5400, 60, 0)
    assert (small.args.model, small.args.max_model_len, small.args.max_num_seqs) == ("smollm2", 8192, 7)
    assert small.args.served_model_name == ["small", "chat", "gpt-4o-mini"]
    assert (vectors.args.model, vectors.args.max_model_len) == ("minilm", 4000)
    assert own.args.model == str(tmp_path / "here.gguf")
    assert served.may_share("small", "vectors") and served.may_share("own", "small")


def test_without_groups_all_may_be_awake(read):
    served = read("models: {a: smollm2, b: smollm2}")
    assert served.may_share("a", "b")


def test_models_outside_the_groups_are_alone(read):
    served = read("models: {a: m, b: m, c: m}\ngroups: {pair: [a, b]}")
    assert served.may_share("a", "b") and not served.may_share("a", "c")


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("models:\n  a: [", 2, "expected the node content"),
        ("models:\n  a:\n   - b\n  - c", 4, "expected <block end>"),
        ("- a", 1, "the file must hold `name: value` lines, found a list"),
        ("modles: {}", 1, "unknown key 'modles'.*Did you mean models"),
        ("models:\n  a: smollm2\n  a: minilm", 3, "'a' stands in line 2 already"),
        ("models:\n  a: smollm2\n  b:\n    model: m\n    aliases: [a]", 5, "'a' belongs to 'a' already"),
        ("models:\n  a:\n    model: m\n    aliases: [x, x]", 4, "'x' belongs to 'a' already"),
        ("models:\n  a:\n    aliases: x\n    model: m", 3, "aliases must be a list of names"),
        ("models:\n  a:\n    preload: yes please\n    model: m", 3, "preload must be true or false"),
        ("models:\n  a:\n    model: m\n    ttl: soon", 4, "ttl: 'soon' cannot be used"),
        ("models:\n  a:\n    ttl: 5", 2, "model is missing"),
        (
            "models:\n  a:\n    model: m\n    max_modle_len: 5",
            4,
            "unknown option --max-modle-len",
        ),
        ("models:\n  a:\n    model: m\n    max_model_len: lots", 4, "max_model_len: .*not a whole number"),
        ("models:\n  a:\n    model: m\n    served_model_name: x", 4, "use aliases"),
        ("models:\n  a: m\nmemory: much", 3, "memory: 'much' cannot be used"),
        ("models:\n  a: m\nmax_loaded: -1", 3, "must be 0 or more"),
        ("models:\n  a: m\ngroups:\n  g: [a, h]\n  h: [g]", 4, "groups contain each other: g -> h -> g"),
        ("models:\n  a: m\ngroups:\n  g: [b]", 4, "'b' is neither a model nor a group"),
        ("models:\n  a: m\ngroups:\n  a: [a]", 4, "'a' is the name of a model"),
        ("models:\n  a: m\ngroups:\n  g: a", 4, "g must be a list of models"),
    ],
)
def test_faults_are_told_with_their_line(read, text, line, fault):
    with pytest.raises(ConfigError, match=rf"models.yaml, line {line}: .*{fault}"):
        read(text)


@pytest.fixture
def folder(tmp_path):
    for name in (
        "one.gguf",
        "pack/two.gguf",
        "full/model.safetensors",
        "full/config.json",
        "empty/notes.txt",
    ):
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "store"


def test_a_folder_of_models(folder):
    served = read_models("", str(folder), {}, max_loaded=2)
    models = {entry.name: entry.args.model for entry in served.entries}
    assert models == {
        "full": str(folder / "full"),
        "one": str(folder / "one.gguf"),
        "pack": str(folder / "pack/two.gguf"),
    }
    assert served.max_loaded == 2


def test_faults_of_folders(folder, tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        read_models("", str(tmp_path / "nowhere"), {})
    with pytest.raises(ConfigError, match="holds no model"):
        read_models("", str(folder / "empty"), {})
    path = tmp_path / "models.yaml"
    path.write_text("models: {one: smollm2}")
    with pytest.raises(ConfigError, match="'one' is in --models and in --models-dir"):
        read_models(str(path), str(folder), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models(str(tmp_path / "nothing.yaml"), "", {})


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["smollm2", "--models-dir", "."], "give one model or several"),
        (["--models", "nothing.yaml"], "cannot be read"),
        (["--models", "m.yaml", "--api-server-count", "2"], "several models have one API process"),
        (["--models-max", "-1"], "models_max must be 1 or more"),
    ],
)
def test_flags_that_cannot_work(flags, text, capsys):
    assert main(["serve", *flags]) == 2
    assert text in capsys.readouterr().err


def test_the_example_is_read():
    served = read_models(str(ROOT / "examples/server/models.yaml"), "", {})
    assert [entry.name for entry in served.entries] == ["smollm2", "gemma", "minilm"]
