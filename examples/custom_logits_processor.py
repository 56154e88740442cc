"""Steering the choice of tokens: by a function of one request, and by a class that serves every request."""

import torch

from octavo import LLM, AdapterLogitsProcessor, SamplingParams

PROMPT = "red blue red blue red blue red blue"


def never_repeat(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """No token comes twice."""
    logits[output_ids] = float("-inf")
    return logits


class Only(AdapterLogitsProcessor):
    """A request with extra_args={"only": token_id} gets this token and no other."""

    def new_req_logits_processor(self, params):
        only = (params.extra_args or {}).get("only")
        return None if only is None else lambda output_ids, logits: keep(logits, only)


def keep(logits: torch.Tensor, token_id: int) -> torch.Tensor:
    """`logits` with one token left."""
    return torch.full_like(logits, float("-inf")).index_fill_(0, torch.tensor([token_id]), 0.0)


if __name__ == "__main__":
    with LLM(logits_processors=[Only]) as llm:
        greedy = {"temperature": 0, "max_tokens": 12}
        [sun] = llm.get_tokenizer().encode(" sun")
        for name, params in {
            "free": SamplingParams(**greedy),
            "never_repeat": SamplingParams(**greedy, logits_processors=[never_repeat]),
            "only": SamplingParams(**greedy, extra_args={"only": sun}),
        }.items():
            [output] = llm.generate(PROMPT, params, use_tqdm=False)
            print(f"{name}: {output.outputs[0].text!r}")
