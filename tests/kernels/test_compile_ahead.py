"""Kernels compiled ahead are those that launches ask for later; whatever fails, launches go on as ever."""

import json
import os
import subprocess
import sys
import threading
from hashlib import sha256

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton: pip install triton")

from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from octavo.runtime.kernels.triton import precompile
from octavo.runtime.kernels.triton.precompile import compile_ahead
from tests import offline_triton

CPU = torch.device("cpu")


def _first(x, N, WIDTH):
    pass


def _second(x, N, WIDTH):
    pass


@pytest.fixture
def compiler(monkeypatch):
    return offline_triton.install(monkeypatch.setattr)


@pytest.fixture
def kernels():
    """Two kernels, though the decorator would make the interpreter's of them here."""
    made = []
    for function in (_first, _second):
        function.__annotations__["WIDTH"] = "tl.constexpr"
        made.append(JITFunction(function))
    return made


def launch(kernels, *widths):
    for kernel in kernels:
        for width in widths:
            kernel[(1,)](torch.zeros(16), 100, WIDTH=width)


def test_nothing_is_launched_and_nothing_is_left_to_compile(compiler, kernels):
    compile_ahead(lambda: [launch(kernels, 1, 2) for _ in range(3)], CPU)
    assert compiler.compiled == {"_first": 2, "_second": 2}
    assert compiler.by_thread == {"compile": 4}
    assert not compiler.launched
    launch(kernels, 1, 2)
    assert compiler.compiled.total() == 4
    assert compiler.launched == {"_first": 2, "_second": 2}
    assert all(kernel.is_loaded for function in kernels for kernel in function.device_caches[0][0].values())


def test_what_is_compiled_already_is_launched(compiler, kernels):
    launch(kernels[:1], 1)
    compile_ahead(lambda: launch(kernels, 1), CPU)
    assert compiler.compiled == {"_first": 1, "_second": 1}
    assert compiler.launched == {"_first": 2}


def test_what_is_kept_is_launched_until_something_is_not(compiler, kernels, monkeypatch, tmp_path):
    """Work of which everything is kept has been done, once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kept = []

    def keep(self, key, *others):
        kept.append(key)
        return note(self, key, *others)

    note = precompile._Notes.submit
    monkeypatch.setattr(precompile._Notes, "submit", keep)
    assert not compile_ahead(lambda: launch(kernels, 1), CPU)
    assert not compiler.launched and len(kept) == 2
    for function in kernels:
        function.device_caches.clear()  # as in another process
    for number, key in enumerate(kept.copy()):
        get_cache_manager(sha256(key.encode()).hexdigest()).put_group("kernel.json", {})
        assert compile_ahead(lambda: launch(kernels, 1), CPU) == (number == 1)
        assert compiler.launched == ({"_first": 1} if number == 0 else {"_first": 2, "_second": 1})
        kernels[1].device_caches.clear()
    launched = compiler.launched.copy()
    kernels[0].device_caches.clear()
    assert not compile_ahead(lambda: launch(kernels, 1), CPU, is_alone=False)
    assert compiler.launched == launched


@pytest.mark.parametrize("times", [1, 3])
def test_a_kernel_that_fails_is_compiled_by_its_launch(compiler, kernels, times):
    compiler.failing = times
    compile_ahead(lambda: launch(kernels, 1), CPU)
    if times == 3:  # its launch, too, fails, with what the compiler said
        with pytest.raises(RuntimeError, match="no compiler today"):
            launch(kernels, 1)
    launch(kernels, 1)
    assert compiler.compiled == {"_first": 1, "_second": 1}
    assert compiler.launched == {"_first": 1, "_second": 1}


def test_work_that_fails_halfway(compiler, kernels):
    def work():
        launch(kernels[:1], 1)
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError):
        compile_ahead(work, CPU)
    launch(kernels, 1)
    assert compiler.compiled == compiler.launched == {"_first": 1, "_second": 1}


def test_another_thread_launches_meanwhile(compiler, kernels):
    """Of another engine: its kernels are compiled at once, and launched; then they are there for all."""

    def work():
        launch(kernels, 1)
        other = threading.Thread(target=launch, args=(kernels, 1), name="other")
        other.start()
        other.join()
        launch(kernels, 1)

    compile_ahead(work, CPU)
    assert compiler.by_thread == {"other": 2}
    assert compiler.launched == {"_first": 2, "_second": 2}


_ENGINE = """
import json, sys
from tests import offline_triton
compiler = offline_triton.install(setattr)
import torch
from octavo import LLM, SamplingParams, TokensPrompt
CPU = torch.device("cpu")
from octavo.runtime.kernels.triton import precompile
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.platforms.platform import Platform
from octavo.runtime.quantization.unquantized import DenseLinear, Unquantized

Unquantized.linear = lambda self, name: DenseLinear(self.storage)
CPUPlatform.__init__ = lambda self, number, threads, snapshot: Platform.__init__(self, CPU, cuda_table())
CPUPlatform.compute_dtype = lambda self, dtype: dtype
CPUPlatform.peak_bytes = lambda self, work: work() or 0
CPUPlatform.graph_capture = lambda self: lambda work: work
CPUPlatform.compile_ahead = lambda self, work, is_alone: precompile.compile_ahead(work, self.device)
llm = LLM(
    sys.argv[2], load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="bfloat16",
    max_model_len=500, max_num_seqs=24, max_num_batched_tokens=400, num_gpu_blocks_override=300,
)
counts = [compiler.by_thread["compile"], compiler.compiled.total()]
for number, options in ((1, {}), (1, {"temperature": 0.5}), (30, {"temperature": 0.5, "top_k": 9})):
    prompts = [TokensPrompt(prompt_token_ids=[1] * (20 + 9 * index)) for index in range(number)]
    llm.generate(prompts, SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | options)), use_tqdm=False)
    counts.append(compiler.compiled.total())
print(json.dumps([counts, compiler.launched.total()]))
"""


def test_an_engine_compiles_all_its_first_requests_need_before_they_come(tmp_path):
    """Nothing is computed, so tokens are whatever there was; that changes nothing in what is compiled."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 3000,
        "max_position_embeddings": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.child", _ENGINE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    counts, launched = json.loads(ended.stdout.splitlines()[-1])
    assert counts[0] >= 15
    assert set(counts) == {counts[0]}
    assert launched > 100
