"""Two replicas of a model share the prompts of one LLM, each in a process of its own."""

from octavo import LLM, SamplingParams


def main() -> None:
    llm = LLM("smollm2", data_parallel_size=2, max_model_len=512)
    prompts = [f"Count from one to {number}:" for number in range(2, 10)]
    params = SamplingParams(temperature=0, max_tokens=8)
    for output in llm.generate(prompts, params, use_tqdm=False):
        print(output.prompt, output.outputs[0].text)
    for metric in llm.get_metrics():
        if metric.name == "vllm:request_success":
            print("replica", metric.labels["engine"], "answered", metric.value)


if __name__ == "__main__":
    main()
