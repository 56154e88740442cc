"""`PoolingWork`: the engine's part of one HTTP request to a pooling model, and what is told of it."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.base.errors import RequestError, wrong
from octavo.base.foreign import NO_POOLING
from octavo.config.pooling import PoolingConfig
from octavo.frontend.async_pooling import pool
from octavo.frontend.outputs.pooling_output import data_of
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.prompts import PromptType
from octavo.messages.pooling import PoolingParams
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.openai.answers import json_response
from octavo.serving.openai.generation import take_fault
from octavo.serving.openai.prompts import one_or_several
from octavo.serving.openai.protocol import Message
from octavo.serving.pooling.protocol import MAX_INPUTS, InputFields, PoolingFields, PoolingUsage
from octavo.serving.registry import Route
from octavo.serving.streaming import leaving, unless_gone


@dataclass(frozen=True, slots=True)
class PoolingWork:
    """A checked body, and who asks."""

    caller: Caller
    body: PoolingFields
    id: str
    created: int

    @classmethod
    def of(cls, caller: Caller, body: PoolingFields, kind: str) -> "PoolingWork":
        """kind: what its name begins with. Raises UnknownModel."""
        caller = caller.asking(body.model, body.lora)
        return cls(caller, body, f"{kind}-{body.request_id or caller.request_id}", int(time.time()))

    @property
    def pooling(self) -> PoolingConfig:
        """How the model pools."""
        assert self.caller.engine.config.pooling is not None
        return self.caller.engine.config.pooling

    async def prompts(self, body: InputFields) -> list[PromptType]:
        """The texts of a body, with the model's prompt before them. Raises RequestError."""
        if (body.input is None) == (body.messages is None):
            raise RequestError("Give input or messages, one of them.", "input")
        if (chats := _chats_of(body)) is not None:
            options = {"add_generation_prompt": bool(body.add_generation_prompt)}
            kwargs = {"chat_template_kwargs": body.chat_template_kwargs} if body.chat_template_kwargs else {}
            return [await self.caller.engine.render(chat, **options, **kwargs) for chat in chats]
        texts = one_or_several(body.input, "input", MAX_INPUTS)
        return [self.instructed(prompt, body.prompt_name) for prompt in texts]

    def instructed(self, prompt: PromptType, name: str | None) -> PromptType:
        """A text behind the model's prompt of that name, or its default one. Raises RequestError."""
        known, name = self.pooling.prompts, self.pooling.default_prompt if name is None else name
        if name and name not in known:
            raise RequestError(
                f"prompt_name {name!r:.100} is not one of the model's: {', '.join(known) or 'it has none'}.",
                "prompt_name",
            )
        instruction = known.get(name, "")
        if not instruction or not isinstance(prompt, str):
            return prompt
        return {"prompt": prompt, "instruction": instruction}

    async def run(self, prompts: Sequence[PromptType], params: PoolingParams) -> list[RequestOutput]:
        """The outputs of all prompts.

        Raises RequestError and Overloaded before anything is computed, HTTPError for what fails in it.
        """
        body, caller = self.body, self.caller
        outputs = await pool(
            caller.engine,
            [caller.salted(prompt, body.cache_salt) for prompt in prompts],
            params,
            self.id,
            tokenization_kwargs=self._tokenization(),
            trace_headers=caller.trace_headers,
            priority=body.priority or 0,
            tenant=caller.tenant,
            deadline_s=body.deadline_s,
            retention_s=body.retention_s,
            prefix_priority=body.prefix_priority,
            in_bulk=caller.is_in_bulk(len(prompts)),
            data_parallel_rank=caller.data_parallel_rank,
            lora_request=caller.lora,
            prompt_adapter_request=caller.learned_prompt,
        )
        for output in outputs:
            if (fault := take_fault(output)) is not None:
                raise fault
        return outputs

    def _tokenization(self) -> Mapping[str, Any]:
        body = self.body
        given = {
            "truncate_prompt_tokens": body.truncate_prompt_tokens,
            "truncation_side": body.truncation_side or "right",
            "add_special_tokens": body.add_special_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}


Answer = Callable[[Caller, Any], Coroutine[None, None, Struct | Response]]
"""What a checked body brings: JSON, or bytes. Raises RequestError, Overloaded, HTTPError."""


def served(model: type[Struct], answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """Return the function of a route: it reads a body, unless the only model generates (404)."""

    async def serve(request: Request) -> Response:
        if (caller := Caller.of(request)).engines.only() is not None:
            check_pooling(caller, request.url.path)
        return await pooled(request, await read_body(request, model, takes_place=True), answer)

    serve.__name__, serve.__doc__ = answer.__name__, answer.__doc__
    return serve


def routes_of(answers: Mapping[str, tuple[type[Struct], Answer]]) -> list[Route]:
    """Return the routes with these paths; what an answer returns is the model of theirs."""
    made = {answer: get_type_hints(answer)["return"] for _, answer in answers.values()}
    models = {answer: (get_args(kind) or [kind])[0] for answer, kind in made.items()}
    return [
        Route(path, served(model, answer), model, models[answer]) for path, (model, answer) in answers.items()
    ]


async def pooled(request: Request, body: Any, answer: Answer) -> Response:
    """What comes of a body, unless the client goes. Raises HTTPError (404) if the model generates."""
    caller = Caller.of(request)
    check_pooling(caller.asking(body.model), request.url.path)
    made = await unless_gone(leaving(request.receive), answer(caller, body))
    return made if isinstance(made, Response) else json_response(made)


def check_pooling(caller: Caller, path: str) -> None:
    """Raise HTTPError (404) if the model generates."""
    if caller.engine.config.pooling is None:
        raise HTTPError(404, f"{path} is not there: {NO_POOLING}.")


def _chats_of(body: InputFields) -> list[list[Message]] | None:
    """The conversations of a body, in messages or in input; None if it has texts. Raises RequestError."""
    given: Any
    field, given = ("input", body.input) if body.messages is None else ("messages", body.messages)
    chats: list[Any]
    match given:
        case [{}, *_]:
            chats = [given]
        case [[{}, *_], *_]:
            chats = given
        case _:
            return None
    if all(isinstance(chat, list) and set(map(type, chat)) == {dict} for chat in chats):
        return chats
    raise wrong(field, "must be one conversation or a list of conversations, each a list of messages")


def usage_of(outputs: Sequence[RequestOutput]) -> PoolingUsage:
    """The tokens of these."""
    count = sum(len(output.prompt_token_ids or ()) for output in outputs)
    return PoolingUsage(count, count)


def arrays(outputs: Sequence[RequestOutput]) -> list[np.ndarray]:
    """The results of these."""
    return [data_of(output) for output in outputs]
