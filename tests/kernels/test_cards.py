"""Every Triton kernel compiles to machine code for every card and takes no more than it has.

No GPU is needed: the launch code runs as on the card, and Triton's compilers for NVIDIA and AMD do the rest.
A few kernels are compiled here, a form of each with --whole; OCTAVO_TEST_CARDS=1 compiles all of them in all
tiles: two hours of one core.
"""

import json
import os
import subprocess
import sys

import pytest

from octavo.base.cards import CARDS, amd_card, nvidia_card
from octavo.base.errors import ConfigError
from octavo.config import dtypes
from octavo.config.checkpoint import Checkpoint

pytest.importorskip("triton", reason="needs the package triton: pip install triton")

from octavo.runtime.kernels.triton import eight_bits, launch, matmul
from tests.card_compiler import AMD, NVIDIA

_REGISTERS = 65536
"""Of a multiprocessor of NVIDIA's, for all threads of a program."""
_MOST_SPILLED = {"gfx1100": 8192}
"""Bytes of a thread, else 4096: unpacking, and products without tensor cores, keep some in memory."""


def compiled(card, *arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.card_compiler", card, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def faults(card, forms):
    """What does not compile, or takes too much."""
    for form in forms:
        most = _MOST_SPILLED.get(card, 4096)
        if (
            "error" in form
            or form["shared"] > CARDS[card].shared_bytes
            or form["spilled"] > most
            or (card.startswith("sm_") and form["registers"] * form["threads"] > _REGISTERS)
        ):
            yield form


@pytest.mark.matrix
@pytest.mark.parametrize("card", ["sm_86", "sm_75", "gfx942"])
def test_what_a_dense_model_launches(card):
    forms = compiled(card, "1", "_prefill_kernel", "_gemv_kernel")
    assert {form["kernel"] for form in forms} == {"_prefill_kernel", "_gemv_kernel"}
    assert list(faults(card, forms)) == []
    assert all(form["registers"] > 8 for form in forms), "the compiler's output was not understood"


@pytest.mark.slow
def test_a_form_of_every_kernel():
    """An engine does not start where one of them fails to."""
    forms = compiled("sm_90", "1")
    assert len(forms) > 45
    assert list(faults("sm_90", forms)) == []


@pytest.mark.opt_in("OCTAVO_TEST_CARDS")
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("card", [*NVIDIA, *AMD])
def test_every_tile_of_every_kernel(card):
    forms = compiled(card)
    assert len(forms) > 100
    assert list(faults(card, forms)) == []
    has_gluon = any(form["kernel"] in ("few_rows_kernel", "_gates_kernel") for form in forms)
    assert has_gluon == (card == "sm_90")


def test_a_kernel_that_takes_too_much_is_found():
    form = {"kernel": "_prefill_kernel", "shared": 114688, "threads": 128, "registers": 220, "spilled": 0}
    assert list(faults("sm_90", [form])) == []
    assert list(faults("sm_86", [form])) == [form]
    assert list(faults("sm_90", [form | {"spilled": 9000}]))
    assert list(faults("sm_90", [form | {"threads": 512}]))


@pytest.fixture
def on(monkeypatch):
    """Let kernels be chosen for a card."""

    def put(name):
        for cached in (matmul._tile, eight_bits.tiles, eight_bits.copied_tiles, launch.overlapped):
            cached.cache_clear()
        monkeypatch.setattr(launch, "card", lambda: CARDS[name])
        monkeypatch.setattr(eight_bits, "card", lambda: CARDS[name])

    yield put
    for cached in (matmul._tile, eight_bits.tiles, eight_bits.copied_tiles, launch.overlapped):
        cached.cache_clear()


def test_the_table_chooses_kernels(on):
    """Only Hopper has Gluon's, and its tiles are those that were measured; less memory, fewer stages."""
    chosen = {}
    for name in CARDS:
        on(name)
        chosen[name] = (launch.has_gluon(), launch.overlapped()["PDL"], eight_bits.can_multiply("F8"))
    assert [name for name, (gluon, _, _) in chosen.items() if gluon] == ["sm_90"]
    assert {name for name, (_, early, _) in chosen.items() if early} == {
        "sm_90", "sm_100", "sm_103", "sm_120", "sm_121",
    }  # fmt: skip
    assert not chosen["sm_86"][2] and chosen["sm_89"][2] and not chosen["gfx942"][2]
    stages = {}
    for name in ("sm_90", "sm_86", "gfx942"):
        on(name)
        stages[name] = matmul._tile(64, 4096, 4096, False)["num_stages"]
    assert stages == {"sm_90": 5, "sm_86": 4, "gfx942": 3}
    assert matmul._tile(16, 4096, 4096, False)["num_stages"] < 6
    on("sm_90")
    assert matmul._tile(16, 4096, 4096, False)["num_stages"] == 6
    assert eight_bits.copied_tiles(2048, 8192, False)["TILE_N"] == 256


def test_cards_by_what_they_say_of_themselves():
    assert nvidia_card(7, 5).name == "sm_75" and not nvidia_card(7, 5).has_bfloat16
    assert nvidia_card(8, 7).name == "sm_87" and nvidia_card(9, 1).name == "sm_90"
    assert amd_card("gfx942:sramecc+:xnack-").warp_size == 64
    assert amd_card("gfx1201").name == "gfx1100" and amd_card("gfx950").name == "gfx942"
    with pytest.raises(ConfigError, match=r"compute capability 7.0; octavo's kernels need 7.5"):
        nvidia_card(7, 0)
    with pytest.raises(ConfigError, match="is a gfx906; octavo's kernels are made for gfx90a"):
        amd_card("gfx906")


def test_the_table_chooses_types(monkeypatch, caplog):
    """As vLLM: float16 on a T4 where bfloat16 was not asked for, an error where it was."""
    checkpoint = Checkpoint(path="p", format="safetensors", config={"torch_dtype": "bfloat16"})
    monkeypatch.setattr(dtypes, "highest_capability", lambda: (7, 5))
    assert dtypes.choose_dtype("auto", checkpoint, "cuda") == "float16"
    assert "dtype='float16' is used" in caplog.text
    with pytest.raises(ConfigError, match="Bfloat16 is only supported on GPUs with compute capability of at"):
        dtypes.choose_dtype("bfloat16", checkpoint, "cuda")
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' needs an NVIDIA GPU of compute capability"):
        dtypes.choose_kv_cache_dtype("fp8", "float16", "cuda")
    monkeypatch.setattr(dtypes, "highest_capability", lambda: (8, 9))
    assert dtypes.choose_dtype("auto", checkpoint, "cuda") == "bfloat16"
    assert dtypes.choose_kv_cache_dtype("fp8", "bfloat16", "cuda") == "float8_e4m3fn"
    assert dtypes.choose_dtype("auto", checkpoint, "cpu") == "bfloat16"
    with pytest.raises(ConfigError, match="fp8"):
        dtypes.choose_kv_cache_dtype("fp8", "bfloat16", "rocm")
