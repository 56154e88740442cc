"""The model gallery, made from the registry of models and the types of GGUF files; for tools/gen_docs.py."""

from typing import NamedTuple

from octavo.base.gguf import BLOCK_TYPES
from octavo.base.hub import BUILT_IN
from octavo.config.gguf_config import _ARCHITECTURES as GGUF_ARCHITECTURES
from octavo.runtime.models.interface import MODELS
from tools.gen_reference import table


class Family(NamedTuple):
    """Published models of an architecture, and one to begin with."""

    models: str
    start: str


FAMILIES = {
    "ArceeForCausalLM": Family("Arcee AFM", "arcee-ai/AFM-4.5B"),
    "Exaone4ForCausalLM": Family("EXAONE 4", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    "Llama4ForCausalLM": Family("Llama 4 (text), contexts below 8,192", "./llama-4-text"),
    "GlmForCausalLM": Family("GLM-4 9B (first)", "zai-org/glm-4-9b-chat-hf"),
    "Ministral3ForCausalLM": Family("Ministral 3 (text)", "./ministral-3"),
    "ApertusForCausalLM": Family("Apertus", "swiss-ai/Apertus-8B-Instruct-2509"),
    "Ernie4_5_MoeForCausalLM": Family("ERNIE 4.5 (experts)", "baidu/ERNIE-4.5-21B-A3B-PT"),
    "FalconH1ForCausalLM": Family("Falcon-H1", "tiiuae/Falcon-H1-1.5B-Instruct"),
    "HunYuanDenseV1ForCausalLM": Family("Hunyuan (dense)", "tencent/Hunyuan-7B-Instruct"),
    "HunYuanMoEV1ForCausalLM": Family("Hunyuan (experts)", "tencent/Hunyuan-A13B-Instruct"),
    "Lfm2MoeForCausalLM": Family("LFM2 (experts)", "LiquidAI/LFM2-8B-A1B"),
    "Qwen3_5MoeForCausalLM": Family("Qwen 3.5 (text, experts)", "./qwen3.5-moe-text"),
    "NemotronForCausalLM": Family("Nemotron 4, Minitron", "nvidia/Minitron-4B-Base"),
    "CohereForCausalLM": Family("Command-R", "CohereForAI/c4ai-command-r-v01"),
    "Cohere2ForCausalLM": Family("Command R7B, Command A", "CohereForAI/c4ai-command-r7b-12-2024"),
    "FalconForCausalLM": Family("Falcon 7B, 40B, 180B, Falcon 2 11B", "tiiuae/falcon-7b-instruct"),
    "GPT2LMHeadModel": Family("GPT-2", "openai-community/gpt2"),
    "GPTJForCausalLM": Family("GPT-J", "./gpt-j"),
    "GPTNeoXForCausalLM": Family("GPT-NeoX, Pythia", "EleutherAI/pythia-410m"),
    "GemmaForCausalLM": Family("Gemma 1", "google/gemma-2b-it"),
    "Gemma2ForCausalLM": Family("Gemma 2", "google/gemma-2-2b-it"),
    "Gemma3ForCausalLM": Family("Gemma 3 (text)", "google/gemma-3-1b-it"),
    "GptOssForCausalLM": Family("gpt-oss", "openai/gpt-oss-20b"),
    "GraniteForCausalLM": Family("Granite 3", "ibm-granite/granite-3.3-2b-instruct"),
    "InternLM2ForCausalLM": Family("InternLM 2", "internlm/internlm2_5-7b-chat"),
    "InternLM3ForCausalLM": Family("InternLM 3", "internlm/internlm3-8b-instruct"),
    "LlamaForCausalLM": Family("Llama 2, Llama 3.x, SmolLM 1 and 2", "meta-llama/Llama-3.1-8B-Instruct"),
    "MistralForCausalLM": Family("Mistral 7B, Mistral Nemo", "mistralai/Mistral-7B-Instruct-v0.3"),
    "GraniteMoeForCausalLM": Family("Granite 3 MoE", "ibm-granite/granite-3.1-3b-a800m-instruct"),
    "GraniteMoeSharedForCausalLM": Family("Granite MoE with shared experts", "./granite-moe-shared"),
    "DeepseekV2ForCausalLM": Family("DeepSeek V2, V2 Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "DeepseekV3ForCausalLM": Family("DeepSeek V3, R1, Kimi-K2", "deepseek-ai/DeepSeek-V3"),
    "Ernie4_5ForCausalLM": Family("ERNIE 4.5 (dense)", "baidu/ERNIE-4.5-0.3B-PT"),
    "Glm4ForCausalLM": Family("GLM-4 0414", "zai-org/GLM-4-9B-0414"),
    "Glm4MoeForCausalLM": Family("GLM-4.5", "zai-org/GLM-4.5-Air"),
    "MiniMaxM2ForCausalLM": Family("MiniMax-M2", "MiniMaxAI/MiniMax-M2"),
    "MinistralForCausalLM": Family("Ministral", "./ministral"),
    "Olmo3ForCausalLM": Family("OLMo 3", "allenai/Olmo-3-7B-Instruct"),
    "GraniteMoeHybridForCausalLM": Family("Granite 4", "ibm-granite/granite-4.0-h-tiny"),
    "Lfm2ForCausalLM": Family("LFM2", "LiquidAI/LFM2-1.2B"),
    "Qwen3NextForCausalLM": Family("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "Qwen3_5ForCausalLM": Family("Qwen 3.5 (text, dense)", "./qwen3.5-text"),
    "SeedOssForCausalLM": Family("Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "MixtralForCausalLM": Family("Mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "OlmoeForCausalLM": Family("OLMoE", "allenai/OLMoE-1B-7B-0125-Instruct"),
    "Qwen2MoeForCausalLM": Family("Qwen 1.5 and 2 MoE", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "Qwen3MoeForCausalLM": Family("Qwen 3 MoE", "Qwen/Qwen3-30B-A3B"),
    "Olmo2ForCausalLM": Family("OLMo 2", "allenai/OLMo-2-1124-7B-Instruct"),
    "OPTForCausalLM": Family("OPT", "./opt"),
    "PhiForCausalLM": Family("Phi 1, Phi 1.5, Phi 2", "microsoft/phi-2"),
    "Phi3ForCausalLM": Family("Phi 3, Phi 4", "microsoft/phi-4"),
    "Qwen2ForCausalLM": Family("Qwen 2, Qwen 2.5", "Qwen/Qwen2.5-7B-Instruct"),
    "Qwen3ForCausalLM": Family("Qwen 3 (dense)", "Qwen/Qwen3-0.6B"),
    "SmolLM3ForCausalLM": Family("SmolLM 3", "HuggingFaceTB/SmolLM3-3B"),
    "StableLmForCausalLM": Family("StableLM", "stabilityai/stablelm-2-1_6b-chat"),
    "Starcoder2ForCausalLM": Family("StarCoder 2", "bigcode/starcoder2-3b"),
}
"""By architecture."""

SIZES = {
    "LlamaForCausalLM": "SmolLM2-135M (Q4_1); Llama 3.1 8B on a GPU, random weights",
    "Gemma3ForCausalLM": "Gemma 3 270M (Q4_K_M)",
    "Qwen3ForCausalLM": "Qwen3-0.6B, random weights",
}
"""What was run at its real size, with a record in benchmarks/results."""


def built_in() -> str:
    """Models that octavo knows by name."""
    rows = [
        (f"`{name}`", model.file, model.licence, f"`octavo serve {name}`") for name, model in BUILT_IN.items()
    ]
    return table(("name", "file", "licence", "command"), rows)


def family(architecture: str) -> Family:
    """What is published of an architecture; one that nobody described goes by its own name."""
    return FAMILIES.get(architecture, Family(architecture.removesuffix("ForCausalLM"), "org/name"))


def families() -> str:
    """Every architecture with a file of its own."""
    gguf = {row.architecture: name for name, row in GGUF_ARCHITECTURES.items()}
    rows = [
        (
            family(name).models,
            f"`{name}`",
            f"`{gguf[name]}`" if name in gguf else "",
            SIZES.get(name, ""),
            f"`octavo serve {family(name).start}`",
        )
        for name in sorted(MODELS.names(), key=lambda name: family(name).models.lower())
    ]
    return table(("models", "architecture", "GGUF name", "run at real size", "command"), rows)


def block_types() -> str:
    """Types of GGUF blocks, from the smallest."""
    rows = [
        (f"`{kind.name}`", f"{8 * kind.num_bytes / kind.block:.2f}".rstrip("0").rstrip("."))
        for kind in sorted(BLOCK_TYPES.values(), key=lambda kind: kind.num_bytes / kind.block)
    ]
    return table(("type", "bits per weight"), rows)
