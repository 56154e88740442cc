"""Beam search as Hugging Face does it, on tiny random models; its use of the cache; best_of."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from octavo import LLM, BeamSearchParams, EngineArgs, RequestError, RequestOutputKind, SamplingParams
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.beam_search.params import BeamSearchOutput
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = pytest.mark.matrix(3)

MODELS = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",  # sliding windows
    "gpt2": "GPT2LMHeadModel",
}
MAX_TOKENS = 14
END_IDS = [3, 17, 40, 41, 77, 90]
"""So many that they are hit often."""


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request, tmp_path_factory):
    """A tiny model in Hugging Face's hands and in ours."""
    oracle = make_oracle(tiny_config(MODELS[request.param]))
    path = save(oracle, tmp_path_factory.mktemp(request.param))
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=400, block_size=4)
    with llm:
        yield SimpleNamespace(oracle=oracle, llm=llm, prompts=make_prompts(oracle.config.vocab_size, (3, 30)))


def oracle_beams(pair, prompt, width, end_ids, max_tokens=MAX_TOKENS, **options):
    """[(output with its end token, score)], best first."""
    with torch.inference_mode():
        found = pair.oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=end_ids or None,
            pad_token_id=-1 % pair.oracle.config.vocab_size,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = row[len(prompt) :]
        end = next((n + 1 for n, token in enumerate(output) if token in end_ids), len(output))
        beams.append((output[:end], score))
    return beams


def own_beams(pair, prompt, width, end_ids, max_tokens=MAX_TOKENS, length_penalty=1.0, **options):
    params = SamplingParams(
        use_beam_search=True,
        n=width,
        best_of=width,
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=end_ids,
        length_penalty=length_penalty,
        **options,
    )
    [output] = pair.llm.generate([prompt], params, use_tqdm=False)
    return [(c.token_ids, c.cumulative_logprob / len(c.token_ids) ** length_penalty) for c in output.outputs]


def is_idle(llm):
    engine = llm.llm_engine
    return engine.core.client.call("stats")["num_blocks_used"] == 0 and not engine.has_unfinished_requests()


@pytest.mark.parametrize("end_ids", [[], END_IDS[:1], END_IDS], ids=["endless", "one-end", "many-ends"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_equal_to_hugging_face(pair, width, end_ids):
    if width == 1:
        options = [{}]  # greedy there, which knows no scores of sequences
    else:
        options = [
            {"length_penalty": penalty, "early_stopping": early}
            for penalty, early in [(1.0, False), (1.0, True), (0.0, "never"), (2.0, "never"), (-1.0, False)]
        ]
    for prompt in pair.prompts:
        for option in options:
            own = own_beams(pair, prompt, width, end_ids, **option)
            if width == 1:
                with torch.inference_mode():
                    output = pair.oracle.generate(
                        torch.tensor([prompt]),
                        max_new_tokens=MAX_TOKENS,
                        do_sample=False,
                        eos_token_id=end_ids or None,
                        pad_token_id=0,
                    )[0, len(prompt) :].tolist()
                assert own[0][0] == output
                continue
            wanted = oracle_beams(pair, prompt, width, end_ids, **option)
            assert [tokens for tokens, _ in own] == [tokens for tokens, _ in wanted], option
            assert [score for _, score in own] == pytest.approx(
                [score for _, score in wanted], rel=1e-5, abs=1e-4
            )
    assert is_idle(pair.llm)


def test_diverse_beams_equal_a_plain_reference(pair):
    """Hugging Face's group beam search as it was, on logits of the whole vocabulary, without a cache."""
    prompt = pair.prompts[1]
    groups, size, penalty, num_tokens = 3, 2, 1.5, 6
    beams = [[([], 0.0)] for _ in range(groups)]
    for _ in range(num_tokens):
        taken = []
        for g, running in enumerate(beams):
            candidates = []
            for output, score in running:
                with torch.inference_mode():
                    logits = pair.oracle(torch.tensor([prompt + output])).logits[0, -1].float()
                logprobs = torch.log_softmax(logits, dim=0)
                logprobs -= penalty * torch.bincount(
                    torch.tensor(taken, dtype=torch.int64), minlength=len(logprobs)
                )
                candidates += [([*output, t], score + logprob) for t, logprob in enumerate(logprobs.tolist())]
            beams[g] = sorted(candidates, key=lambda pair: -pair[1])[:size]
            taken += [output[-1] for output, _ in beams[g]]
    wanted = sorted((beam for group in beams for beam in group), key=lambda pair: -pair[1])
    own = own_beams(
        pair, prompt, groups * size, [], num_tokens, num_beam_groups=groups, diversity_penalty=penalty
    )
    assert [tokens for tokens, _ in own] == [tokens for tokens, _ in wanted]
    assert len({tuple(tokens[:2]) for tokens, _ in own}) >= groups


def watched_steps(llm):
    """The steps that the engine gives out from now on."""
    scheduler = llm.llm_engine.core.client._core.scheduler
    plan, steps = scheduler.schedule, []

    def schedule():
        step = plan()
        if step is not None:
            steps.append((step, scheduler.kv.pool.num_used))
        return step

    scheduler.schedule = schedule
    return steps


def test_beams_share_the_blocks_of_a_long_prompt(tiny_llama, make_llm):
    """23 full blocks in common; a beam owns the block it writes to, and so does its parent."""
    width, size = 6, 4
    llm = make_llm(tiny_llama, block_size=size)
    steps = watched_steps(llm)
    [prompt] = make_prompts(128, (23 * size,))
    [output] = llm.beam_search([prompt], BeamSearchParams(width, 2 * size, ignore_eos=True))
    assert len(output.sequences) == width
    assert max(used for _, used in steps) <= 23 + 5 * width
    assert [step.num_tokens for step, _ in steps] == [len(prompt)] + [width] * (2 * size - 1)
    for n, (step, _) in enumerate(steps[1:]):
        num_shared = len(prompt) + n
        assert len(step.block_copies) == (width if num_shared % size else 0), "only partly filled blocks"
    assert is_idle(llm)


def test_many_prompts_are_searched_in_the_same_steps(tiny_model, make_llm):
    llm = make_llm(tiny_model, block_size=4)
    params = BeamSearchParams(3, 8, ignore_eos=True, length_penalty=0.5)
    prompts = make_prompts(128, (5, 17, 40, 6))
    alone = [llm.beam_search(prompt, params)[0] for prompt in prompts]
    steps = watched_steps(llm)
    together = llm.beam_search(prompts, params)
    assert len(steps) == 8
    for limited in (together, llm.beam_search(prompts, params, concurrency_limit=3)):
        for own, other in zip(alone, limited, strict=True):
            assert [s.tokens for s in own.sequences] == [s.tokens for s in other.sequences]
            assert [s.cum_logprob for s in own.sequences] == [s.cum_logprob for s in other.sequences]
    assert is_idle(llm)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"steps_in_flight": 2}])
def test_pressure_changes_nothing(tiny_model, make_llm, options):
    """Hardly more blocks than one request of the longest kind needs."""
    params = BeamSearchParams(4, 12, ignore_eos=True)
    prompts = make_prompts(128, (5, 17, 40, 6))
    wanted = make_llm(tiny_model).beam_search(prompts, params)
    limits = {"block_size": 4, "max_model_len": 60, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    limits["num_gpu_blocks_override"] = 24 if "llama" in tiny_model.name else 40
    llm = make_llm(tiny_model, **(limits | options))
    others = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(prompts)
    search = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, use_beam_search=True, n=4, best_of=4
    )
    tracker, num_dropped = llm.llm_engine.core.client._core.scheduler._tracker, []
    drop_oldest = tracker.drop_oldest_retained
    tracker.drop_oldest_retained = lambda: drop_oldest() and not num_dropped.append(1)
    outputs = llm.generate(prompts * 2, [search] * len(prompts) + others, use_tqdm=False)
    assert num_dropped or options, "the pool was not tight"
    for output, beams in zip(outputs, wanted, strict=False):
        ids = [sequence.tokens[len(output.prompt_token_ids) :] for sequence in beams.sequences]
        assert [completion.token_ids for completion in output.outputs] == ids
    assert is_idle(llm)


def test_what_a_search_returns(tiny_llama, make_llm):
    end_ids = list(range(0, 128, 4))
    llm = make_llm(tiny_llama, override_generation_config={"eos_token_id": end_ids})
    [prompt] = make_prompts(128, (9,))
    [output] = llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(4, 20, early_stopping=True))
    assert {s.finish_reason for s in output.sequences} <= {"stop", "length"}
    assert "stop" in {s.finish_reason for s in output.sequences}
    for sequence in output.sequences:
        ids = sequence.tokens[len(prompt) :]
        assert sequence.tokens[: len(prompt)] == prompt
        assert (ids[-1] in end_ids) == (sequence.finish_reason == "stop")
        assert sequence.stop_reason is None
        assert sequence.text is None
        assert len(sequence.logprobs) == len(ids)
        chosen = [position[token] for token, position in zip(ids, sequence.logprobs, strict=True)]
        assert sequence.cum_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
        assert all(len(position) in (8, 9) for position in sequence.logprobs)
        for position in sequence.logprobs:
            ranks = {entry.rank: entry.logprob for entry in position.values()}
            assert sorted(ranks.values(), reverse=True) == [ranks[rank] for rank in sorted(ranks)]


def test_users_limits_do_not_bind_the_search(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, max_logprobs=2)
    [prompt] = make_prompts(128, (9,))
    [output] = llm.beam_search([prompt], BeamSearchParams(8, 4, ignore_eos=True))
    assert len(output.sequences) == 8
    assert {len(position) for s in output.sequences for position in s.logprobs} <= {2, 3}
    one = SamplingParams(use_beam_search=True, best_of=8, n=2, temperature=0, max_tokens=4, ignore_eos=True)
    [request] = llm.generate([prompt], one, use_tqdm=False)
    assert [c.token_ids for c in request.outputs] == [s.tokens[9:] for s in output.sequences[:2]]
    assert [c.index for c in request.outputs] == [0, 1]
    assert [c.logprobs for c in request.outputs] == [None, None]


def test_refusals_leave_the_engine_idle(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, logprobs_mode="processed_logprobs")
    params = BeamSearchParams(2, 4)
    with pytest.raises(RequestError, match="logprobs_mode=raw_logprobs"):
        llm.beam_search([[1, 2]], params)
    with pytest.raises(RequestError, match="concurrency_limit"):
        llm.beam_search([[1, 2]], params, concurrency_limit=0)
    assert llm.beam_search([], params) == []
    assert is_idle(llm)


def test_aborted_searches_let_go_of_everything(tiny_llama, make_llm):
    llm = make_llm(tiny_llama)
    engine = llm.llm_engine
    search = BeamSearchParams(4, 50, ignore_eos=True).to_sampling_params()
    ids = [engine.add_request(None, prompt, search) for prompt in make_prompts(128, (20, 30))]
    for _ in range(7):
        assert engine.step() == []
    engine.abort_request(ids)
    while engine.core.client.has_work():
        engine.step()
    assert is_idle(llm)


@pytest.mark.slow
async def test_the_asynchronous_engine_searches_too(tiny_llama, make_llm):
    params = BeamSearchParams(3, 8, ignore_eos=True)
    prompts = make_prompts(128, (5, 40))
    wanted = make_llm(tiny_llama).beam_search(prompts, params)
    engine = AsyncLLM.from_engine_args(
        EngineArgs(
            model=str(tiny_llama), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=400
        )
    )

    async def search(prompt):
        outputs = [output async for output in engine.generate(prompt, params.to_sampling_params())]
        assert [output.finished for output in outputs] == [True]
        return BeamSearchOutput.from_request(outputs[0], params, None)

    try:
        found = await asyncio.gather(*map(search, prompts))
        assert [[s.tokens for s in o.sequences] for o in found] == [
            [s.tokens for s in o.sequences] for o in wanted
        ]
        endless = BeamSearchParams(3, 240, ignore_eos=True).to_sampling_params()
        stream = engine.generate(prompts[0], endless, "r")
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        await engine.abort("r")
        [beam, *_] = (await task).outputs
        assert beam.finish_reason == "abort"
        assert len(beam.token_ids) < 240
        assert (await engine.core.client.call("stats"))["num_blocks_used"] == 0
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_best_of(tiny_llama, make_llm, kind):
    llm = make_llm(tiny_llama)
    [prompt] = make_prompts(128, (12,))
    common = {"max_tokens": 6, "seed": 4, "ignore_eos": True}
    [everything] = llm.generate([prompt], SamplingParams(n=6, logprobs=0, **common), use_tqdm=False)
    ranked = sorted(everything.outputs, key=lambda c: -c.cumulative_logprob)
    engine = llm.llm_engine
    engine.add_request("r", prompt, SamplingParams(n=2, best_of=6, output_kind=kind, **common))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    [output] = outputs
    assert output.finished
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in ranked[:2]]
    assert [(c.index, c.logprobs, c.cumulative_logprob) for c in output.outputs] == [
        (0, None, None),
        (1, None, None),
    ]


def test_best_of_shows_logprobs_that_were_asked_for(tiny_llama, make_llm):
    llm = make_llm(tiny_llama)
    params = SamplingParams(n=1, best_of=3, logprobs=2, max_tokens=5, seed=1)
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    [completion] = output.outputs
    chosen = [p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_embeddings_as_a_prompt(pair, make_llm):
    """The same search, whether the prompt comes as ids or as their embeddings."""
    prompt = pair.prompts[1]
    rows = pair.oracle.get_input_embeddings()(torch.tensor(prompt)).detach()
    llm = make_llm(pair.llm.model_config.model, enable_prompt_embeds=True)
    params = BeamSearchParams(3, 6, ignore_eos=True)
    [wanted] = pair.llm.beam_search([prompt], params)
    [found] = llm.beam_search([{"prompt_embeds": rows}], params)
    outputs = [[s.tokens[len(prompt) :] for s in output.sequences] for output in (found, wanted)]
    assert outputs[0] == outputs[1]
    assert is_idle(llm)
