"""Several prompts at once, with one set of sampling parameters."""

from octavo import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=24)

with LLM() as llm:
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
