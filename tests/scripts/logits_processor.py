"""A logits processor for the whole batch, and one that makes a function for each request."""

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

logger = init_logger(__name__)


class Only(LogitsProcessor):
    """Requests that name a target token get nothing else."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target!r} is not an int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(
            self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target_token")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.targets.items():
            kept = logits[row, target].clone()
            logits[row] = float("-inf")
            logits[row, target] = kept
        return logits


class Never:
    """Of one request: a token that is not to come."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[self.token] = float("-inf")
        return logits


class PerRequest(AdapterLogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        self.device = device

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        never = (params.extra_args or {}).get("never")
        if never is None:
            logger.warning("no token to leave out")
            return None
        return Never(never)


def main():
    llm = LLM(model="smollm2", logits_processors=[Only, PerRequest])
    prompt = "The capital of France is"

    def ids(**extra_args):
        params = SamplingParams(temperature=0.0, max_tokens=4, extra_args=extra_args or None)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    free = ids()
    print("only:", list(ids(target_token=67)) == [67] * 4)
    print("never:", ids(never=free[0])[0] != free[0])
    try:
        ids(target_token="word")
    except ValueError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
