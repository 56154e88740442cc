"""lm-eval: likelihoods of choices, tokenized as the server says. Argument: the server's URL."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

ITEMS = [
    {"question": "The colour of grass is", "choices": [" green", " of"], "answer": 0},
    {"question": "The capital of France is", "choices": [" Tuesday", " Paris"], "answer": 1},
]
TASK = """
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
with tempfile.TemporaryDirectory() as folder:
    os.environ["HF_HOME"] = folder
    items = Path(folder, "items.jsonl")
    items.write_text("\n".join(map(json.dumps, ITEMS)), encoding="utf-8")
    Path(folder, "facts.yaml").write_text(TASK.format(file=items), encoding="utf-8")
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "smollm2",
            "base_url": f"{sys.argv[1]}/v1/completions",
            "tokenizer_backend": "remote",
            "tokenized_requests": False,
        },
        tasks=["facts"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
    )
assert found["results"]["facts"]["acc,none"] == 1.0, found["results"]
