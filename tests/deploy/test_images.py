"""deploy/docker: the Dockerfile as hadolint reads it, what it copies, and the tool that carries it out."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compose_spec
import pytest
import yaml

from octavo.base.hub import BUILT_IN
from octavo.cli.main import make_parser
from octavo.cli.serve import configs
from tools import run_dockerfile

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/docker"
TEXT = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
HADOLINT = Path(sys.executable).with_name("hadolint")


def hadolint(file):
    command = [HADOLINT, "--no-color", "--config", ROOT / ".hadolint.yaml", file]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed")
def test_hadolint_finds_nothing(tmp_path):
    assert hadolint(FOLDER / "Dockerfile") == []
    (tmp_path / "Dockerfile").write_text(
        TEXT.replace(" --no-install-recommends", "").replace("USER 10001", "")
    )
    assert {line.split()[1] for line in hadolint(tmp_path / "Dockerfile")} >= {"DL3015"}


def test_what_is_copied_is_there_and_not_ignored():
    sent = set((FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines())
    stages = run_dockerfile.parse(TEXT)
    copied = [rest.split()[:-1] for stage in stages.values() for word, rest in stage.steps if word == "COPY"]
    bound = re.findall(r"type=bind,source=([^,]+)", TEXT)
    for source in {*bound, *(name for names in copied for name in names)}:
        assert (ROOT / source).exists() and f"!{source}" in sent, source
    assert {line[1:] for line in sent if line.startswith("!")} == {
        *bound,
        *(n for names in copied for n in names),
    }


def test_the_last_stage_is_for_cpus_and_each_image_runs_as_nobody_in_particular():
    stages = run_dockerfile.parse(TEXT)
    assert list(stages) == ["wheel", "base", "cuda", "cpu"]
    for name in ("cpu", "cuda"):
        steps = stages[name].steps
        assert steps[-2][0] == "USER" and int(steps[-2][1]) > 0 and "octavo pull" in steps[-1][1]
        assert ("ARG", "MODEL=smollm2") in steps and "smollm2" in BUILT_IN


def test_octavo_reads_the_configurations():
    for file, host in ((FOLDER / "serve.yaml", "0.0.0.0"), (ROOT / "deploy/systemd/serve.yaml", "127.0.0.1")):
        key = ["--api-key", "k"]
        engine, server = configs(make_parser("serve").read(["--config", str(file), *key]))
        assert (server.host, server.port, engine.model) == (host, 8000, "smollm2")


def compose(**environment):
    """The file as compose-spec's models read it, its variables filled in."""
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    text = re.sub(r"\$\{(\w+):?[-?]([^}]*)\}", lambda match: environment.get(match[1], match[2]), text)
    content = yaml.safe_load(text)
    compose_spec.ComposeSpecification.model_validate(content)
    return content


def test_compose():
    content = compose(OCTAVO_API_KEY="k", MODEL="gemma3-270m")
    services = content["services"]
    octavo = services["octavo"]
    assert octavo["build"]["args"]["MODEL"] == "gemma3-270m" and octavo["build"]["target"] == "cpu"
    args = make_parser("serve").read(["--config", str(FOLDER / "serve.yaml"), *octavo["command"]])
    args.api_key = ["k"]
    engine, server = configs(args)
    assert engine.model == "gemma3-270m" and server.open_monitoring
    assert int(octavo["stop_grace_period"].removesuffix("s")) > engine.shutdown_timeout
    assert services["octavo-cuda"]["build"]["target"] == "cuda"
    assert (FOLDER / octavo["build"]["context"] / octavo["build"]["dockerfile"]).is_file()
    named = set(content["volumes"])
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in named or (FOLDER / source).exists(), source
    assert all(port.startswith("127.0.0.1:") for s in services.values() for port in s.get("ports", ()))


def test_a_wrong_compose_file_is_noticed():
    with pytest.raises(ValueError, match="services"):
        compose_spec.ComposeSpecification.model_validate({"services": {"a": {"ports": {"b": 1}}}})


SMALL = """\
FROM tiny AS first
# a comment
ENV WHO=me PATH=$PATH:/more
WORKDIR /made
COPY one ./
COPY folder inside
RUN printf "$WHO $PWD $(id -u)" \\
    > result \\
    && cat one inside/two >> result

FROM tiny AS unused
RUN false

FROM first AS last
ARG WHAT=nothing
USER 10001
RUN --mount=type=bind,from=first,source=/made,target=/tmp/seen printf "$WHAT $(id -u) $(cat /tmp/seen/one)"
EXPOSE 1
"""


@pytest.fixture
def tiny(tmp_path):
    """A root whose programs are this machine's, lent; and files to copy."""
    if (
        os.geteuid()
        or not shutil.which("unshare")
        or subprocess.run(["unshare", "--mount", "true"], check=False).returncode
    ):
        pytest.skip("needs root, and namespaces of mounts")
    root, context = tmp_path / "root", tmp_path / "context"
    (context / "folder").mkdir(parents=True)
    (context / "one").write_text("1")
    (context / "folder/two").write_text("2")
    for name in ("proc", "sys", "dev", "tmp", "usr"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")

    def make(text, *flags):
        (tmp_path / "Dockerfile").write_text(text)
        command = [sys.executable, ROOT / "tools/run_dockerfile.py", tmp_path / "Dockerfile"]
        command += ["--context", context, "--work", tmp_path / "work"]
        command += ["--base", f"tiny={root}", "--lend", "/usr=/usr", *flags]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return make


def test_steps_are_carried_out(tiny, tmp_path):
    done = tiny(SMALL, "--build-arg", "WHAT=something", "--then", "echo and $WHO")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work/first/made/result").read_text() == "me /made 012"
    assert "something 10001 1" in done.stdout and "and me" in done.stdout
    assert re.search(r"^last: \d+ MiB$", done.stdout, re.MULTILINE)
    assert not (tmp_path / "work/unused").exists() and not any((tmp_path / "work/last/usr").iterdir())


@pytest.mark.parametrize("line", ["RUN false", "ONBUILD RUN true", "COPY nothing ./", "RUN touch /usr/lent"])
def test_a_step_that_fails_ends_it(tiny, line):
    assert tiny(f"FROM tiny AS last\n{line}\n").returncode != 0
