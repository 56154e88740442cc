"""Answers of the base model, of an adapter, and of half of one.

Start the server with adapters: octavo serve --enable-lora --lora-modules demo=path/to/adapter
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
PROMPT = "The sea is"


def answer(model: str, **extra: object) -> str:
    """Complete the prompt under a model's name."""
    completion = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=extra
    )
    return completion.choices[0].text


models = {model.id: model.parent for model in client.models.list().data}
base = next(name for name, parent in models.items() if parent is None)
print(f"{base}: {answer(base)!r}")
for name, parent in models.items():
    if parent is not None:
        print(f"{name} of {parent}: {answer(name)!r}")
        print(f"half of {name}: {answer(base, lora=[{'name': name, 'scale': 0.5}])!r}")
