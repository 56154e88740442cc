"""One seat and four requests: the urgent ones are answered first, smaller numbers before larger ones."""

from octavo import EngineArgs, LLMEngine, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(scheduling_policy="priority", max_num_seqs=1))
params = SamplingParams(temperature=0, max_tokens=8)
for name, priority in {"whenever": 9, "soon": 5, "urgent": 0, "also soon": 5}.items():
    engine.add_request(name, "The sea is", params, priority=priority)

while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            print(f"{output.request_id}: waited {output.metrics.queue_time:.2f} s")
engine.shutdown()
