"""The prompts of a completion request, in every form that OpenAI's protocol has for them.

Called by the routes of completions and tokenization. Cheap checks only: the input processor does the rest.
"""

from typing import Any

from octavo.base.errors import RequestError
from octavo.frontend.requests.prompts import PromptType
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.serving.openai.embeds import read_embeds
from octavo.serving.openai.infill import infilled
from octavo.serving.openai.protocol import MAX_PROMPTS, CompletionRequest

_FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def prompts_of(request: CompletionRequest, tokenizer: Tokenizer | None) -> list[PromptType]:
    """One prompt or several. Raises RequestError."""
    if request.suffix:
        return [infilled(request.prompt, request.suffix, tokenizer)]
    if request.prompt_embeds is None:
        return _read(request.prompt)
    if request.prompt:
        raise RequestError("Give prompt or prompt_embeds, not both.", "prompt_embeds")
    if request.echo:
        raise RequestError("echo has nothing to show of prompt_embeds.", "echo")
    files = request.prompt_embeds
    return [{"prompt_embeds": read_embeds(file)} for file in ([files] if isinstance(files, str) else files)]


def _read(prompt: Any) -> list[PromptType]:
    if prompt is None:
        raise RequestError("Either prompt or prompt_embeds must be given.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt)) if isinstance(prompt, list) else set()
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}) and len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}.", "prompt")
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in prompt)):
        return list(prompt)
    raise RequestError(f"prompt must be {_FORMS}, none of them empty.", "prompt")
