"""Makes a folder with Python, torch and octavo's compiled packages for AArch64.

`python tools/arm64_system.py FOLDER`. qemu-aarch64 runs them on x86-64, as tests/kernels/test_arm64.py does.
FOLDER/root is Debian's Python, unpacked by debootstrap, which must be root; FOLDER/site has PyPI's builds for
AArch64 of what is compiled. Packages of Python alone come from the environment that runs the tests.
On Debian: apt-get install debootstrap qemu-user g++-aarch64-linux-gnu.
"""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

TORCH = "torch==2.10.0"
"""The last one whose build for AArch64 on PyPI asks for no CUDA."""
COMPILED = """
aiohttp frozenlist hf-xet httptools llguidance MarkupSafe msgspec multidict numpy propcache psutil
pydantic_core pyyaml pyzmq regex safetensors tokenizers uvloop websockets yarl
"""
FOR = ["--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none"]
FOR += [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (17, 26, 27, 28, 31, 34)]
"""Debian 12."""


def main(folder: Path) -> None:
    """Make both parts."""
    root, wheels = folder / "root", folder / "wheels"
    debian = ["--foreign", "--arch=arm64", "--variant=minbase", "--include=python3", "bookworm"]
    subprocess.run(["debootstrap", *debian, str(root)], check=True)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):  # nothing of it is configured
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    wanted = [TORCH, *(f"{name}=={version(name)}" for name in COMPILED.split())]
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    subprocess.run([*pip, *FOR, *wanted], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
