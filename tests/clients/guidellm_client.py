"""guidellm: a benchmark of synthetic prompts. Arguments: the server's URL, a folder with its tokenizer."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, tokenizer = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    command = ["guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},model=smollm2"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    command += ["--output", f"kind=json,path={report}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": folder}
    subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True, env=environment)
    [benchmark] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
requests = benchmark["requests"]
assert (len(requests["successful"]), requests["errored"]) == (4, []), requests
for request in requests["successful"]:
    assert request["output_metrics"]["total_tokens"] == 8, request
    assert request["prompt_tokens"] >= 32, request
    assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1000, request
