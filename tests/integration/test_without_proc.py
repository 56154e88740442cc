"""Where there is no /proc and nobody may write to /dev/shm, as on macOS, a server starts and answers.

torch itself reads /proc/cpuinfo on x86-64 Linux, and computes nothing without it: that file alone stays.

Runs with --whole alone; tests/integration/test_serve_process.py has servers where both are there.
"""

import os
import shutil
import subprocess

import pytest

from octavo import LLM, SamplingParams
from tests.served_process import ServeProcess

HIDE = """
cp /proc/cpuinfo "$TMPDIR/cpuinfo"
mount -t tmpfs none /proc
cp "$TMPDIR/cpuinfo" /proc
mount -t tmpfs -o ro none /dev/shm
test ! -e /proc/self -a ! -w /dev/shm
exec "$@"
"""
START = (
    "import os, sys; os.execvp('unshare', ['unshare', '--mount', 'sh', '-ec', sys.argv[1], 'sh', "
    "sys.executable, '-m', 'octavo', 'serve', *sys.argv[2:]])"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_needs_neither_proc_nor_shared_memory():
    unshare = ["unshare", "--mount", "true"]
    if os.geteuid() or not shutil.which("unshare") or subprocess.run(unshare, check=False).returncode:
        pytest.skip("needs root, and namespaces of mounts")
    prompt, options = "The capital of France is", ("--max-model-len", "256")
    params = SamplingParams(temperature=0, max_tokens=12)
    [expected] = LLM("smollm2", max_model_len=256).generate([prompt], params, use_tqdm=False)
    with ServeProcess("smollm2", *options, program=["-c", START, HIDE]) as server:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == expected.outputs[0].text
        assert server.get("/metrics").status_code == 200
        server.signal()
        assert server.end() == 0, server.log
