"""Parsers by name (options `tool_call_parser`, `reasoning_parser`), and which one a chat template suggests.

Names are vLLM's; several families share a format.
"""

from octavo.base.registry import Registry
from octavo.frontend.parsers.scanner import Parser

_TOOLS = {
    "hermes:HermesParser": "hermes ernie45 granite4 qwen qwen3_json",
    "hermes:ApertusParser": "apertus",
    "hermes:CohereParser": "cohere_command3 cohere_command4",
    "hermes:GigaChatParser": "gigachat3",
    "hermes:GraniteParser": "granite",
    "hermes:Granite20bParser": "granite-20b-fc",
    "hermes:InternLMParser": "internlm",
    "hermes:JambaParser": "jamba hunyuan_a13b minimax",
    "hermes:LongCatParser": "longcat",
    "hermes:Phi4MiniParser": "phi4_mini_json",
    "llama:Llama3JsonParser": "llama3_json llama4_json",
    "llama:XlamParser": "xlam",
    "mistral:MistralParser": "mistral",
    "pythonic:PythonicParser": "pythonic llama4_pythonic",
    "pythonic:Lfm2Parser": "lfm2",
    "pythonic:Olmo3Parser": "olmo3",
    "sections:DeepSeekParser": "deepseek_v3 deepseek_v31",
    "sections:KimiParser": "kimi_k2",
    "sections:PlamoParser": "plamo3",
    "gemma:FunctionGemmaParser": "functiongemma",
    "gemma:Gemma4Parser": "gemma4",
    "channels:HarmonyParser": "openai",
    "channels:InklingParser": "inkling",
    "channels:MuseParser": "muse_glimmer",
    "channels:MuseSparkParser": "muse musespark1x",
    "tagged:TaggedParser": "qwen3_coder qwen3_xml mimo step3p5 step5",
    "tagged:DeepSeek32Parser": "deepseek_v32",
    "tagged:DeepSeek4Parser": "deepseek_v4",
    "tagged:DeepSeek41Parser": "deepseek_v41",
    "tagged:DotsParser": "dots",
    "tagged:GlmParser": "glm45 glm47 ling3 poolside_v1",
    "tagged:HorizonParser": "k2_horizon",
    "tagged:HyParser": "hy_v3 hy_v4",
    "tagged:KimiK3Parser": "kimi_k3",
    "tagged:MiniCPMParser": "minicpm5",
    "tagged:MiniMaxParser": "minimax_m2",
    "tagged:SeedToolParser": "seed_oss",
    "tagged:SolarParser": "solar_open2",
    "tagged:Step3Parser": "step3",
    "minimax:MiniMaxM3Parser": "minimax_m3",
}
_REASONING = {
    "think:ThinkParser": "think deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 glm45 glm47"
    " granite_thinking_parser holo2 kimi_k2 ling3 longcat mimo minicpmv nemotron_v3 olmo3 poolside_v1 qwen3"
    " step3p5",
    "think:DeepSeekR1Parser": "deepseek_r1 minimax_m2 step3 step5",
    "think:AppendThinkParser": "minimax_m2_append_think",
    "think:ApertusThinkParser": "apertus",
    "think:CohereThinkParser": "cohere_command3 cohere_command4",
    "think:ErnieThinkParser": "ernie45",
    "think:GraniteThinkParser": "granite",
    "think:HorizonThinkParser": "k2_horizon",
    "think:HunyuanThinkParser": "hunyuan_a13b",
    "think:HyThinkParser": "hy_v3 hy_v4",
    "think:KimiK3ThinkParser": "kimi_k3",
    "think:MagistralParser": "mistral",
    "think:MiniMaxM3ThinkParser": "minimax_m3",
    "think:PlamoThinkParser": "plamo3",
    "think:SeedParser": "seed_oss",
    "think:SolarThinkParser": "solar_open2",
    "gemma:Gemma4Parser": "gemma4",
    "channels:HarmonyParser": "openai_gptoss",
    "channels:InklingParser": "inkling",
    "channels:MuseParser": "muse_glimmer",
    "channels:MuseSparkParser": "muse musespark1x",
}


def _by_name(formats: dict[str, str]) -> dict[str, str]:
    return {name: f"{__package__}.{parser}" for parser, names in formats.items() for name in names.split()}


TOOL_PARSERS: Registry[type[Parser]] = Registry("tool call parser", _by_name(_TOOLS))
REASONING_PARSERS: Registry[type[Parser]] = Registry("reasoning parser", _by_name(_REASONING))

_TOOL_MARKS = (
    ("<|channel|>", "openai"),
    ("<|content_invoke_tool_json|>", "inkling"),
    ("<atem:invoke", "muse_glimmer"),
    ("]<]minimax[>[", "minimax_m3"),
    ("<|open|>", "kimi_k3"),
    ("<｜DSML｜function_calls", "deepseek_v32"),
    ("<｜DSML｜tool_calls", "deepseek_v4"),
    ("<｜DSML｜ calls", "deepseek_v41"),
    ("<ifm|tool_call", "k2_horizon"),
    ("<|plamo:begin_tool", "plamo3"),
    ("<|tool_call:start|>", "solar_open2"),
    ("<dots_function_call>", "dots"),
    ("<|tools_prefix|>", "apertus"),
    ("<tool_sep", "hy_v3"),
    ("<param name=", "minicpm5"),
    ("function call<|role_sep|>", "gigachat3"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<｜tool▁calls▁begin｜> & ```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
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
    ("<|content_thinking|>", "inkling"),
    ("<|open|>", "kimi_k3"),
    ("<mm:think>", "minimax_m3"),
    ("<ifm|think", "k2_horizon"),
    ("<|plamo:begin_think", "plamo3"),
    ("<|think:start|>", "solar_open2"),
    ("<|inner_prefix|>", "apertus"),
    ("<|START_THINKING|>", "cohere_command3"),
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
    return next((name for mark, name in marks if all(part in template for part in mark.split(" & "))), "")
