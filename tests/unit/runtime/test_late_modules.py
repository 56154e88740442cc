"""What of torch waits runs as if it had run at once, whoever asks first. Scripts that have torch keep it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from octavo.runtime import late_modules
{before}
late_modules.import_torch()
import torch
count = len(sys.modules)
{use}
modules = {{name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}}
names = {{name: sorted(vars(module)) for name, module in modules.items()}}
types = sorted({{type(modules[name]).__name__ for name in late_modules._LATE & modules.keys()}})
print(json.dumps([count, len(late_modules._FINDER._waiting), names, types]))
"""


def ran(use, before=""):
    """Modules when torch was there; those that wait after a use; names in torch's; types of the late ones."""
    program = PROGRAM.format(before=before, use=use)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "use",
    [
        "assert torch.profiler.profile",
        "import torch.utils.bundled_inputs",
        "import torch.export.pt2_archive",
        "from torch.optim import *; assert SGD",
        "from octavo.runtime.platforms.meta import MetaPlatform; MetaPlatform(torch.float32)",
        "torch.vmap(torch.sin)(torch.ones(2)); assert torch.vmap is torch.func.vmap",
        "import torch._dynamo",
        "from torch._subclasses import FakeTensorMode; assert torch.fx.Graph",
        "torch.nested.nested_tensor([torch.ones(2)])",
        "assert torch.broadcast_shapes((2, 1), (1, 3)) == (2, 3)",
        "import threading; t = threading.Thread(target=lambda: torch.optim.SGD); t.start(); t.join()",
    ],
)
def test_all_of_it_is_there_once_some_is_asked_for(use):
    count, waiting, names, types = ran(use)
    whole, _, expected, _ = ran(use, "import torch")
    assert count < whole - 200 and waiting == 0
    assert names == expected and types == ["module"]


@pytest.mark.parametrize(
    "use", ["torch.relu(torch.ones(2, device=torch.device('cpu'))).sum()", "torch.Generator().manual_seed(1)"]
)
def test_what_nobody_asks_for_waits(use):
    _, waiting, _, types = ran(use)
    assert waiting > 20 and types == ["_LateModule"]


def test_a_script_that_has_torch_keeps_it_whole():
    _, waiting, _, types = ran("", "import torch")
    assert waiting == 0 and types == ["module"]
