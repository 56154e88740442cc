"""What PEFT writes beside a learned prompt: `read_prompt_tuning` reads adapter_config.json."""

from dataclasses import dataclass
from pathlib import Path

from octavo.base.errors import RequestError
from octavo.config.lora import CONFIG, read_peft_files

PREFIX, MULTITASK = "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING"
KINDS = ("PROMPT_TUNING", "P_TUNING", MULTITASK, PREFIX)
_MOST_TOKENS = 100_000


@dataclass(frozen=True)
class PromptTuning:
    """One learned prompt. kind: of KINDS; num_tasks: 1, but of a multitask prompt"""

    kind: str
    num_virtual_tokens: int
    num_tasks: int = 1


def is_learned_prompt(folder: Path) -> bool:
    """Return True if a folder holds a learned prompt, not LoRA. Raises RequestError if it holds neither."""
    return read_peft_files(folder).get("peft_type") in KINDS


def read_prompt_tuning(folder: Path) -> PromptTuning:
    """Read the config of a learned prompt. Raises RequestError for what is missing or wrong."""
    config = read_peft_files(folder)
    kind, count, tasks = (config.get(name) for name in ("peft_type", "num_virtual_tokens", "num_tasks"))
    if kind not in KINDS:
        text = f"peft_type {kind!r} is no learned prompt: those are {', '.join(KINDS)}."
        raise RequestError(f"{folder / CONFIG}: {text}", "path")
    if type(count) is not int or not 1 <= count <= _MOST_TOKENS:
        text = f"num_virtual_tokens must be a positive integer, found {count!r}."
        raise RequestError(f"{folder / CONFIG}: {text}", "path")
    if (config.get("num_transformer_submodules") or 1) != 1:
        raise RequestError(f"{folder / CONFIG}: prompts of encoder-decoder models are not supported.", "path")
    return PromptTuning(str(kind), count, tasks if kind == MULTITASK and type(tasks) is int else 1)
