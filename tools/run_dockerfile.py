"""Carry out a Dockerfile without a daemon: its COPYs and RUNs, step by step, in folders as roots. Needs root.

    debootstrap --variant=minbase bookworm /tmp/bookworm
    python tools/run_dockerfile.py deploy/docker/Dockerfile --target cpu --work /tmp/images \\
        --base debian:bookworm-slim=/tmp/bookworm --then "octavo generate Hello"

A base image is a folder as debootstrap fills it, from which Debian's image is made too. Stages lie below
--work; only those that the target needs are made. An instruction that octavo's Dockerfile lacks is an error.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_WITHOUT_STEPS = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "STOPSIGNAL", "VOLUME")
_MOUNTED = ("proc", "sys", "dev")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.so")
"""As .dockerignore says."""


@dataclass
class Stage:
    """A root in the making."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    root: Path = Path()
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"


def parse(text: str) -> dict[str, Stage]:
    """Return the stages by name, in their order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = stage = Stage(name, base)
        elif word:
            stage.steps.append((word, rest.strip()))
    return stages


@dataclass(frozen=True)
class Maker:
    """Makes stages; each may be the base of others, or lend them files."""

    stages: dict[str, Stage]
    context: Path
    work: Path
    bases: dict[str, Path]
    arguments: dict[str, str]
    lent: dict[str, str]
    """Variables and folders of this machine that RUN steps see: certificates, an index of packages."""

    def make(self, name: str) -> Stage:
        """Make a stage, or return it as it was made."""
        stage = self.stages[name]
        if stage.root != Path():
            return stage
        base = self.make(stage.base) if stage.base in self.stages else None
        stage.root = self.work / name
        subprocess.run(["rm", "-rf", stage.root], check=True)
        self.work.mkdir(parents=True, exist_ok=True)
        source = base.root if base else self.bases[stage.base]
        subprocess.run(["cp", "-a", "--reflink=auto", source, stage.root], check=True)
        if base:
            stage.environment, stage.user, stage.folder = dict(base.environment), base.user, base.folder
        for word, rest in stage.steps:
            began = time.monotonic()
            self._step(stage, word, rest)
            print(f"{name}: {word} {rest[:90]}  [{time.monotonic() - began:.1f} s]", flush=True)
        return stage

    def _step(self, stage: Stage, word: str, rest: str) -> None:
        if word == "RUN":
            self.run(stage, rest)
        elif word == "COPY":
            self._copy(stage, rest)
        elif word == "ENV":
            stage.environment |= {n: _filled(v, stage) for n, v in _pairs(rest)}
        elif word == "ARG":
            [(name, default)] = _pairs(rest)
            stage.arguments[name] = self.arguments.get(name, default)
        elif word == "USER":
            stage.user = rest
        elif word == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word not in _WITHOUT_STEPS:
            raise SystemExit(f"run_dockerfile knows no {word}.")

    def _copy(self, stage: Stage, rest: str) -> None:
        *sources, target = shlex.split(rest)
        place = stage.root / Path(stage.folder, target).as_posix().lstrip("/")
        for source in sources:
            path = self.context / source
            if path.is_dir():
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=_IGNORED)
            else:
                file = place / path.name if target.endswith("/") else place
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, file)

    def run(self, stage: Stage, rest: str) -> None:
        """Run a line of a shell in a stage's root, as its user."""
        binds = {stage.root / name: Path("/", name) for name in _MOUNTED}
        while match := re.match(r"--mount=(\S+)\s+", rest):
            options = dict(_pairs(match[1].replace(",", " ")))
            source = self.make(options["from"]).root if "from" in options else self.context
            binds[stage.root / options["target"].lstrip("/")] = source / options["source"].lstrip("/")
            rest = rest[match.end() :]
        lent = {name: value for name, value in self.lent.items() if not name.startswith("/")}
        binds |= {stage.root / n.lstrip("/"): Path(v) for n, v in self.lent.items() if n.startswith("/")}
        environment = {**stage.environment, **stage.arguments, **lent, "HOME": "/tmp"}
        inner = ["chroot", f"--userspec={stage.user}:{stage.user}", str(stage.root), "/bin/sh", "-ec"]
        script = []
        for place, source in binds.items():
            script.append(f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(place))}")
            if place.name not in _MOUNTED:  # a step must not change what is lent to it
                script.append(f"mount -o remount,ro,bind {shlex.quote(str(place))}")
        script.append(shlex.join([*inner, f"cd {stage.folder}; {rest}"]))
        made = [place for place, source in binds.items() if _make_place(place, source)]
        command = ["unshare", "--mount", "sh", "-ec", "\n".join(script)]
        subprocess.run(command, check=True, env=environment | {"PATH": stage.environment["PATH"]})
        for place in reversed(made):
            place.rmdir() if place.is_dir() else place.unlink()


def _make_place(place: Path, source: Path) -> bool:
    """Make what a mount needs; return True if it was not there."""
    if place.exists():
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir() if source.is_dir() else place.touch()
    return True


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (word.partition("=") for word in shlex.split(text))]


def _filled(value: str, stage: Stage) -> str:
    known = stage.environment | stage.arguments
    return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), value)


def main() -> None:
    """Make a target, say how large it is, and try it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--target", default="", help="A stage (default: the last).")
    parser.add_argument("--context", type=Path, default=Path.cwd())
    parser.add_argument("--work", type=Path, required=True, help="A folder for the stages.")
    for flag, what in (
        ("--base", "IMAGE=FOLDER of a base image."),
        ("--build-arg", "NAME=VALUE of an ARG."),
        ("--lend", "NAME=VALUE or /FOLDER=FOLDER that RUN steps see besides."),
    ):
        parser.add_argument(flag, action="append", default=[], metavar="NAME=VALUE", help=what)
    parser.add_argument(
        "--then", action="append", default=[], metavar="LINE", help="Run it in what was made."
    )
    args = parser.parse_args()
    stages = parse(args.dockerfile.read_text(encoding="utf-8"))
    bases = {name: Path(folder) for name, folder in _split(args.base).items()}
    maker = Maker(stages, args.context, args.work, bases, _split(args.build_arg), _split(args.lend))
    stage = maker.make(args.target or list(stages)[-1])
    size = subprocess.run(["du", "-sxm", stage.root], capture_output=True, text=True, check=True)
    print(f"{stage.name}: {size.stdout.split()[0]} MiB")
    for line in args.then:
        maker.run(stage, line)


def _split(given: Iterable[str]) -> dict[str, str]:
    return dict(item.partition("=")[::2] for item in given)


if __name__ == "__main__":
    main()
