"""What an engine counts, by kind of metric."""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector


def main():
    llm = LLM(model="smollm2", disable_log_stats=False)
    llm.generate(["Hello, my name is", "The future of AI is"], SamplingParams(temperature=0.8, max_tokens=5))
    for metric in llm.get_metrics():
        assert isinstance(metric, Metric)
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram) sum = {metric.sum} count = {metric.count}")
            for bound, count in metric.buckets.items():
                print(f"    {bound} = {count}")


if __name__ == "__main__":
    main()
