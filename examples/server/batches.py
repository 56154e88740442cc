"""A file of requests, answered in the background by the server: OpenAI's files and batches."""

import json
import time

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
lines = [
    {"custom_id": f"colour-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    for number in range(3)
    for body in [
        {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "seed": number}
    ]
]
content = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("requests.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.05)
    batch = client.batches.retrieve(batch.id)
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
