"""An `octavo.LLM` for the command line's tests: it answers one word per step, from a table."""

from octavo.base.errors import PromptTooLong
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.messages.sampling import SamplingParams

LIMIT = 400


class FakeEngine:
    """Speaks LLMEngine's interface. `answers`: last line of the prompt's user → words; else it echoes."""

    def __init__(self):
        self.answers = {}
        self.prompts = {}
        self.params = {}
        self.aborted = []
        self.interrupt_at = None
        self._open = {}

    def add_request(self, request_id, prompt, params):
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt["prompt_token_ids"]))
        if len(text) > LIMIT:
            raise PromptTooLong(f"The prompt has {len(text)} tokens, the context {LIMIT}.")
        self.prompts[request_id], self.params[request_id] = text, params
        asked = text.removesuffix("\nassistant:").rpartition("\n")[2].removeprefix("user:")
        self._open[request_id] = [self.answers.get(asked, f"echo {asked}").split(" "), 0]

    def has_unfinished_requests(self):
        return bool(self._open)

    def abort_request(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def step(self):
        outputs = []
        for request_id, state in list(self._open.items()):
            words, state[1] = state[0], state[1] + 1
            if self.interrupt_at == state[1]:
                raise KeyboardInterrupt
            done = state[1] == len(words)
            failed = words[-1] == "FAIL"
            answers = [
                CompletionOutput(
                    index=i,
                    text=" ".join(words[: state[1]]),
                    token_ids=list(range(state[1])),
                    finish_reason=("error" if failed else "stop") if done else None,
                    error="it broke" if failed and done else None,
                )
                for i in range(self.params[request_id].n)
            ]
            prompt = self.prompts[request_id]
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    prompt=prompt,
                    prompt_token_ids=[ord(c) for c in prompt],
                    prompt_logprobs=None,
                    outputs=answers,
                    finished=done,
                    num_cached_tokens=1,
                )
            )
            if done:
                del self._open[request_id]
        return outputs


class FakeLLM:
    """What the command line uses of LLM."""

    def __init__(self, args, chat_template=True, recommended=None):
        self.args = args
        self.llm_engine = FakeEngine()
        self.has_chat_template = chat_template
        self.is_closed = False
        self._recommended = recommended or SamplingParams()

    def render_chat(self, messages):
        """A conversation is laid out as role:content lines; token ids are character codes."""
        text = "\n".join(f"{m['role']}:{m['content']}" for m in messages) + "\nassistant:"
        return {"prompt_token_ids": [ord(c) for c in text], "prompt": text}

    def get_default_sampling_params(self):
        return self._recommended

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True
