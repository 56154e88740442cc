"""What an engine counts: the times of each request, totals, distributions."""

from octavo import LLM, SamplingParams
from octavo.metrics import Counter, Histogram

with LLM() as llm:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=16)
    for output in llm.generate(["The sea is", "To make bread, one"], params, use_tqdm=False):
        times = output.metrics
        print(
            f"{output.prompt!r}: waited {times.queue_time:.3f} s, first token after "
            f"{times.first_token_latency:.3f} s, {times.num_generation_tokens} tokens"
        )
    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            print(f"{metric.name}: {metric.value}")
        elif isinstance(metric, Histogram) and metric.count:
            print(f"{metric.name}: {metric.count} observations, mean {metric.sum / metric.count:.3g}")
