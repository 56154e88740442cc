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
_JAMBA, _CODER, _GLM = _HERE + "hermes:JambaParser", _HERE + "tagged:TaggedParser", _HERE + "tagged:GlmParser"
_COHERE = _HERE + "hermes:CohereParser"

TOOL_PARSERS: Registry[type[Parser]] = Registry(
    "tool call parser",
    {
        "cohere_command3": _COHERE,
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v31": _DEEPSEEK,
        "ernie45": _HERMES,
        "functiongemma": _HERE + "gemma:FunctionGemmaParser",
        "gemma4": _GEMMA_4,
        "glm45": _GLM,
        "glm47": _GLM,
        "granite": _HERE + "hermes:GraniteParser",
        "granite-20b-fc": _HERE + "hermes:Granite20bParser",
        "granite4": _HERMES,
        "hermes": _HERMES,
        "hunyuan_a13b": _JAMBA,
        "internlm": _HERE + "hermes:InternLMParser",
        "jamba": _JAMBA,
        "kimi_k2": _HERE + "kimi:KimiParser",
        "lfm2": _HERE + "pythonic:Lfm2Parser",
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "llama4_pythonic": _PYTHONIC,
        "longcat": _HERE + "hermes:LongCatParser",
        "minimax_m2": _HERE + "tagged:MiniMaxParser",
        "mistral": _HERE + "mistral:MistralParser",
        "openai": _HARMONY,
        "phi4_mini_json": _HERE + "hermes:Phi4MiniParser",
        "pythonic": _PYTHONIC,
        "qwen": _HERMES,
        "qwen3_coder": _CODER,
        "qwen3_json": _HERMES,
        "qwen3_xml": _CODER,
        "seed_oss": _HERE + "tagged:SeedToolParser",
        "step3": _HERE + "tagged:Step3Parser",
    },
)
REASONING_PARSERS: Registry[type[Parser]] = Registry(
    "reasoning parser",
    {
        "deepseek_r1": _R1,
        "deepseek_v3": _THINK,
        "gemma4": _GEMMA_4,
        "glm45": _THINK,
        "glm47": _THINK,
        "granite": _HERE + "think:GraniteThinkParser",
        "holo2": _THINK,
        "kimi_k2": _THINK,
        "mimo": _THINK,
        "minimax_m2": _R1,
        "mistral": _HERE + "think:MagistralParser",
        "nemotron_v3": _THINK,
        "olmo3": _THINK,
        "openai_gptoss": _HARMONY,
        "qwen3": _THINK,
        "seed_oss": _HERE + "think:SeedParser",
        "step3": _R1,
        "think": _THINK,
    },
)

_TOOL_MARKS = (
    ("<|channel|>", "openai"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|im_middle|>", "kimi_k2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<steptml:", "step3"),
    ("<longcat_tool_call>", "longcat"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|action_start|>", "internlm"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
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
