"""What an engine counts: totals, distributions, and the times of each request."""

from octavo import LLM, SamplingParams
from octavo.metrics import Histogram

with LLM() as llm:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=16)
    for output in llm.generate(["The sea is", "To make bread, one"], params, use_tqdm=False):
        times = output.metrics
        print(
            f"{output.prompt!r}: waited {times.queue_time:.3f} s, first token after "
            f"{times.first_token_latency:.3f} s, {times.num_generation_tokens} tokens"
        )
    for metric in llm.get_metrics():
        if isinstance(metric, Histogram):
            print(f"{metric.name}: {metric.count} observations, sum {metric.sum:.3f}")
        else:
            print(f"{metric.name}: {metric.value:g}")
