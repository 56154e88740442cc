"""The likeliest continuations of a prompt, found by beam search; then the same with beams that differ."""

from octavo import LLM, BeamSearchParams

PROMPT = "The capital of France is"

with LLM() as llm:
    for params in (
        BeamSearchParams(beam_width=3, max_tokens=8),
        BeamSearchParams(beam_width=3, max_tokens=8, num_beam_groups=3, diversity_penalty=2.0),
    ):
        [output] = llm.beam_search([PROMPT], params)
        print(f"{params.num_beam_groups} group(s):")
        for beam in output.sequences:
            print(f"  {beam.cum_logprob:7.2f}  {beam.text.removeprefix(PROMPT)!r}")
