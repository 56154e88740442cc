"""Loading ahead of the import of torch, and without the garbage collector."""

import gc
import subprocess
import sys
import threading

import pytest

from octavo.engine.executor.inproc import InprocExecutor
from octavo.runtime import preload
from tests.fakes import fake_config

PROGRAM = """
import sys, threading
from octavo.runtime import preload
preload.begin()
for thread in threading.enumerate():
    if thread.name == "preload":
        thread.join()
print("torch" in sys.modules, "libtorch_cpu" in open("/proc/self/maps").read())
import torch
preload.begin()
print(float(torch.ones(3).sum()), any(thread.name == "preload" for thread in threading.enumerate()))
"""


class Loading:
    """A worker that notes whether rubbish is collected while it loads."""

    def __init__(self, config, rank, address):
        self.is_collecting = gc.isenabled()

    def load(self):
        if gc.isenabled():
            raise AssertionError
        return self

    def close(self):
        """Nothing to free."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_library_is_there_before_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "3.0", "False"]


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05])
def test_a_process_that_ends_early_ends_well(pause_s):
    """As one whose model does not exist does: not under a library that is being set up."""
    program = f"import time; from octavo.runtime import preload; preload.begin(); time.sleep({pause_s})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_is_as_it_was_after_loading(was_on):
    (gc.enable if was_on else gc.disable)()
    try:
        executor = InprocExecutor(f"{__name__}:Loading")
        assert not executor.start(fake_config()).is_collecting
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


class Driver:
    """CUDA's, with so many GPUs."""

    def __init__(self, count):
        self.count, self.made = count, []

    def cuInit(self, flags):
        return flags

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return int(number >= self.count)

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.made.append(device.value)


@pytest.mark.parametrize(("device", "made"), [("cuda:1", [1]), ("cuda", [0]), ("cuda:2", []), ("cpu", [])])
def test_a_context_is_made_for_the_gpu_that_will_be_used(device, made, monkeypatch):
    driver = Driver(count=2)
    monkeypatch.setattr(preload.ctypes, "CDLL", lambda _: driver)
    preload.make_context(device)
    for thread in threading.enumerate():
        if thread.name == "make-context":
            thread.join()
    assert driver.made == made
