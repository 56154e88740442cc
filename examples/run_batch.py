"""A file of requests answered without a server: what `octavo run-batch` does, called from Python."""

import json
import tempfile
from pathlib import Path

from octavo.cli.main import main

PROMPTS = ["The capital of France is", "The sea is", "To make bread, one"]

with tempfile.TemporaryDirectory() as folder:
    requests, answers = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, prompt in enumerate(PROMPTS)
        for body in [{"prompt": prompt, "max_tokens": 8, "temperature": 0}]
    ]
    requests.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    status = main(["run-batch", "-i", str(requests), "-o", str(answers)])
    for line in map(json.loads, answers.read_text(encoding="utf-8").splitlines()):
        choice = line["response"]["body"]["choices"][0]
        print(f"{PROMPTS[int(line['custom_id'])]!r} -> {choice['text']!r}")
print("exit status", status)
