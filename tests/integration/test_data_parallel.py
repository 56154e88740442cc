"""Two replicas give the tokens of one through the whole engine."""

from octavo import SamplingParams


def test_two_replicas_equal_one(tiny_llama, make_llm):
    prompts = [[i + 1] * (3 + 7 * i) for i in range(5)]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, temperature=t, seed=3, n=n)
        for t, n in ((0.0, 1), (0.0, 1), (0.7, 2), (1.0, 3), (0.0, 1))
    ]
    texts = []
    for size in (1, 2):
        llm = make_llm(tiny_llama, data_parallel_size=size)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([[c.token_ids for c in output.outputs] for output in outputs])
        llm.sleep()
        llm.wake_up()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([[c.token_ids for c in output.outputs] for output in outputs])
    assert all(text == texts[0] for text in texts)
