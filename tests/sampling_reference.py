"""The sampler's oracle: vLLM's formulas for one row, written plainly with NumPy in float64."""

from dataclasses import dataclass, field

import numpy as np

from octavo.messages.request import RequestSpec
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest


@dataclass
class Case:
    """One request as the oracle sees it."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    seed: int = 0
    stop_ids: list[int] = field(default_factory=lambda: [0])
    outputs: list[int] = field(default_factory=list)

    def message(self, request_id="r") -> NewRequest:
        token_ids = self.prompt + self.outputs
        return NewRequest(
            request_id, token_ids, len(self.prompt), RequestSpec(self.params, self.seed, self.stop_ids)
        )


def processed(logits: np.ndarray, case: Case) -> np.ndarray:
    """Logits after every processor, before the temperature."""
    p, x, outputs = case.params, logits.astype(np.float64), case.outputs
    if p.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in p.allowed_token_ids]] = -np.inf
    x[p.forbidden_token_ids or []] = -np.inf
    for *prefix, last in p.bad_words_token_ids or []:
        if not prefix or outputs[-len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(outputs) < p.min_tokens:
        x[case.stop_ids] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(case.prompt) | set(outputs):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(outputs):
        x[token] -= p.frequency_penalty * outputs.count(token) + p.presence_penalty
    return x


def distribution(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probabilities of processed logits: temperature, then min_p, top_k, top_p."""
    x = x / p.temperature
    probabilities = softmax(x)
    x[probabilities < p.min_p * probabilities.max()] = -np.inf
    if p.top_k > 0:
        x[x < np.sort(x)[::-1][min(p.top_k, len(x)) - 1]] = -np.inf
    order = np.argsort(-x, kind="stable")
    ordered = softmax(x)[order]
    before = np.cumsum(ordered) - ordered
    if p.top_p < 1:
        x[order[before >= p.top_p]] = -np.inf
    return softmax(x)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()
