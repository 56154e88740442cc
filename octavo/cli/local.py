"""`LocalModel`: the backend that is a model in this process."""

import itertools

import octavo
from octavo.base.errors import ConfigError, RequestError
from octavo.cli.backend import Answer, Message, Piece


class LocalModel:
    """Asks an engine, one question at a time."""

    def __init__(self, llm: "octavo.LLM", params: "octavo.SamplingParams") -> None:
        """params: with cumulative outputs."""
        self._llm = llm
        self._params = params
        self._ids = itertools.count()

    def chat(self, messages: list[Message]) -> Answer:
        """The conversation goes through the model's chat template. Raises ConfigError without one."""
        if not self._llm.has_chat_template:
            raise ConfigError(
                "This model has no chat template: give one with --chat-template, or use `octavo complete`."
            )
        return self._answer(self._llm.render_chat(messages))

    def complete(self, prompt: str) -> Answer:
        """The text as it stands."""
        return self._answer(prompt)

    def _answer(self, prompt: "octavo.PromptType") -> Answer:
        engine, request_id = self._llm.llm_engine, str(next(self._ids))
        engine.add_request(request_id, prompt, self._params)
        shown = 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    [answer] = output.outputs
                    yield Piece(answer.text[shown:], len(answer.token_ids))
                    shown = len(answer.text)
                    if answer.error is not None:
                        raise RequestError(answer.error)
        except BaseException:  # an interrupt, or the reader has left
            engine.abort_request([request_id])
            raise
