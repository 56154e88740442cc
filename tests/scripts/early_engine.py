"""The form of vLLM's first articles, with one word changed: six configs, and an engine that is awaited."""

import asyncio

from octavo.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.engine import LLMEngine
from octavo.sampling_params import SamplingParams

assert LoRAConfig is not None


async def main():
    engine = LLMEngine(
        model_config=ModelConfig(model="smollm2", dtype="float32", trust_remote_code=False),
        cache_config=CacheConfig(
            block_size=16, gpu_memory_utilization=0.9, swap_space=1, enable_kv_cache_compression=True
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_model_len=1024, max_num_batched_tokens=2048, enable_continuous_batching=True
        ),
        device_config=DeviceConfig(device="cpu", seed=42),
        lora_config=None,
        distributed_init_method="env://",
    )
    params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=8)
    request_id = await engine.add_request(prompt="The capital of France is", sampling_params=params)
    completed = []
    while not completed:
        completed = await engine.step()
    answer = completed[0].outputs[0]
    print(f"{completed[0].request_id == request_id} {answer.text!r} {len(answer.token_ids)}")
    try:
        await engine.add_request(sampling_params=params)
    except ValueError as error:
        print(error)
    engine.add_request(prompt="Hello", sampling_params=params)
    steps = 1
    while not any(output.finished for output in engine.step()):
        steps += 1
    print("steps:", steps)


asyncio.run(main())
