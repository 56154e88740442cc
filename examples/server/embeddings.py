"""Ask an embedding server for vectors with OpenAI's client, and for a ranking: octavo serve minilm"""

import httpx
from openai import OpenAI

URL = "http://127.0.0.1:8000"
QUERY = "How do plants make food?"
TEXTS = ["Plants make sugar from light.", "The train leaves at noon.", "Leaves are green."]


def main():
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    vectors = client.embeddings.create(model=model, input=TEXTS).data
    print(len(vectors), "vectors of", len(vectors[0].embedding))

    body = {"model": model, "query": QUERY, "documents": TEXTS}
    for result in httpx.post(f"{URL}/rerank", json=body, timeout=60).json()["results"]:
        print(f"{result['relevance_score']:.2f} {result['document']['text']}")


if __name__ == "__main__":
    main()
