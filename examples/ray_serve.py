"""A Ray Serve application with OpenAI's routes, on a Ray cluster of this machine alone."""

import httpx
import ray
from ray import serve

from octavo.ray.serve import build_app


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": 8321})
    app = build_app({"model": "smollm2", "max_model_len": 512, "max_replicas": 2})
    serve.run(app, name="llm")
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
    answer = httpx.post("http://127.0.0.1:8321/v1/chat/completions", json=body, timeout=120)
    print("assistant:", answer.json()["choices"][0]["message"]["content"])
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
