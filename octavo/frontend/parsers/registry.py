"""Parsers by name (options `tool_call_parser`, `reasoning_parser`), and which one a chat template suggests.

Names are vLLM's; several families share a format.
"""

from octavo.base.registry import Registry
from octavo.frontend.parsers.scanner import Parser

_HERE = "octavo.frontend.parsers."
_HERMES, _THINK = _HERE + "hermes:HermesParser", _HERE + "think:ThinkParser"
_GEMMA_4, _HARMONY = _HERE + "gemma:Gemma4Parser", _HERE + "harmony:HarmonyParser"
_LLAMA, _PYTHONIC = _HERE + "llama:Llama3JsonParser", _HERE + "pythonic:PythonicParser"
_DEEPSEEK, _R1 = _HERE + "deepseek:DeepSeekParser", _HERE + "think:DeepSeekR1Parser"

TOOL_PARSERS: Registry[type[Parser]] = Registry(
    "tool call parser",
    {
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v31": _DEEPSEEK,
        "functiongemma": _HERE + "gemma:FunctionGemmaParser",
        "gemma4": _GEMMA_4,
        "hermes": _HERMES,
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "llama4_pythonic": _PYTHONIC,
        "mistral": _HERE + "mistral:MistralParser",
        "openai": _HARMONY,
        "pythonic": _PYTHONIC,
        "qwen": _HERMES,
        "qwen3_json": _HERMES,
    },
)
REASONING_PARSERS: Registry[type[Parser]] = Registry(
    "reasoning parser",
    {
        "deepseek_r1": _R1,
        "deepseek_v3": _THINK,
        "gemma4": _GEMMA_4,
        "glm45": _THINK,
        "granite": _HERE + "think:GraniteThinkParser",
        "mistral": _HERE + "think:MagistralParser",
        "openai_gptoss": _HARMONY,
        "qwen3": _THINK,
        "seed_oss": _HERE + "think:SeedParser",
        "think": _THINK,
    },
)

_TOOL_MARKS = (
    ("<|channel|>", "openai"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ('"parameters":', "llama3_json"),
    ("<|python_start|>", "pythonic"),
)
_REASONING_MARKS = (
    ("<|channel|>", "openai_gptoss"),
    ("<|channel>thought", "gemma4"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("<think>", "think"),
)


def suggested_tool_parser(chat_template: str) -> str:
    """The format that the template shows the model; "" when it shows none that is known."""
    return _first_of(_TOOL_MARKS, chat_template) if "tools" in chat_template else ""


def suggested_reasoning_parser(chat_template: str) -> str:
    """The tags that the template speaks of; "" when there are none."""
    return _first_of(_REASONING_MARKS, chat_template)


def _first_of(marks: tuple[tuple[str, str], ...], template: str) -> str:
    return next((name for mark, name in marks if mark in template), "")
