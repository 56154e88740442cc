"""`generate`: a stage of Ray Data that answers each row of a dataset, on one engine or several.

rows = ray.data.read_json("prompts.jsonl")
generate(rows, "org/name", sampling_params={"max_tokens": 64}, concurrency=2).write_json("answers")
"""

from collections.abc import Mapping
from typing import Any

from octavo.llm import LLM
from octavo.messages.sampling import SamplingParams

_BATCH = 256


class Generate:
    """A worker of the stage: an engine that lives as long as the stage. For `Dataset.map_batches`."""

    def __init__(self, engine: Mapping[str, Any], sampling_params: Mapping[str, Any], prompt: str) -> None:
        self._llm, self._prompt = LLM(**engine), prompt
        self._params = SamplingParams(**sampling_params)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with what was generated for each row."""
        prompts = [value.tolist() if hasattr(value, "tolist") else value for value in batch[self._prompt]]
        is_chat = bool(prompts) and isinstance(prompts[0], list) and isinstance(prompts[0][0], dict)
        ask = self._llm.chat if is_chat else self._llm.generate
        outputs = ask(prompts, self._params, use_tqdm=False)
        firsts = [output.outputs[0] for output in outputs]
        return batch | {
            "generated_text": [first.text for first in firsts],
            "finish_reason": [str(first.finish_reason) for first in firsts],
            "num_prompt_tokens": [len(output.prompt_token_ids or ()) for output in outputs],
            "num_generated_tokens": [len(first.token_ids) for first in firsts],
        }


def generate(
    dataset: Any,
    model: str,
    *,
    prompt: str = "prompt",
    sampling_params: Mapping[str, Any] | None = None,
    concurrency: int = 1,
    batch_size: int = _BATCH,
    num_gpus: float = 0,
    num_cpus: float = 1,
    **engine: Any,
) -> Any:
    """Return the dataset with the columns generated_text, finish_reason and numbers of tokens.

    prompt: the column of prompts: texts, lists of token ids, or conversations (lists of messages)
    concurrency: engines; num_gpus, num_cpus: of each
    batch_size: rows that an engine gets at once, enough to keep its batch full
    engine: options of `LLM`
    """
    return dataset.map_batches(
        Generate,
        fn_constructor_args=({"model": model, **engine}, dict(sampling_params or {}), prompt),
        batch_size=batch_size,
        concurrency=concurrency,
        num_gpus=num_gpus,
        num_cpus=num_cpus,
    )
