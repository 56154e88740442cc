"""`check_fit`: refuses a request that could never run in this engine. Called by the scheduler."""

from octavo.base.errors import PromptTooLong
from octavo.config.scheduling import SchedulerConfig
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.messages.request import EngineRequest


def check_fit(
    request: EngineRequest, kv: KVCacheManager, config: SchedulerConfig, max_model_len: int
) -> None:
    """Raise PromptTooLong when context, cache or a step have no room for what it may become."""
    num_prompt, longest = len(request.prompt_token_ids), max_model_len
    if request.texts:
        num_prompt = max(text.num_tokens for text in request.texts)
    if not 0 < num_prompt < longest:
        raise PromptTooLong(
            f"The prompt has {num_prompt} tokens; it must have at least 1 and at most {longest - 1}, "
            f"to leave room for output within max_model_len={longest}.",
            "prompt",
        )
    max_tokens = request.limits.max_tokens
    num_kept = min(num_prompt + max_tokens, longest) - 1  # the last is never computed
    needed, usable = kv.peak_blocks(num_kept, config.max_chunk), kv.num_usable_blocks
    if needed > usable:
        raise PromptTooLong(
            f"Prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) need {needed} blocks of "
            f"KV cache; the engine has {usable}. Shorten the prompt, lower max_tokens, or give the "
            "engine's KV cache more memory.",
            "prompt",
        )
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and num_kept > budget:
        raise PromptTooLong(
            f"Prompt and output of {num_kept} tokens exceed the {budget} of one step. Lower max_tokens, "
            "raise max_num_batched_tokens, or leave enable_chunked_prefill on.",
            "prompt",
        )
