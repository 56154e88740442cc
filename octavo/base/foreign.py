"""What other engines have and octavo has not, by name, and what becomes of each.

Fields of requests, keywords of SamplingParams, routes; `config.foreign` has the options. A value that
asks for nothing passes in silence. Any other is dropped, with a text that says why nothing is lost; or it is
refused, with what would work. Each front raises the error that its callers expect.
"""

from typing import Any, NamedTuple

OFF: tuple[Any, ...] = (False, 0, "", {}, [])


class Foreign(NamedTuple):
    """How one name is taken."""

    neutral: tuple[Any, ...]
    """Values that ask for nothing."""
    text: str
    is_refused: bool = True
    is_switch: bool = False
    """On the command line it takes no value."""
    is_list: bool = False
    """On the command line it takes several."""

    def asks(self, value: Any) -> bool:
        """Whether the value asks for something."""
        is_bool = isinstance(value, bool)  # True is not 1
        return not any(value == neutral and is_bool == isinstance(neutral, bool) for neutral in self.neutral)


def _ignored(text: str) -> Foreign:
    return Foreign(OFF, text, is_refused=False)


def _refused(text: str, *neutral: Any) -> Foreign:
    return Foreign((None, *OFF, -1, *neutral), text)


TOP_EMA = "no paper and no engine says what Top-EMA sampling is. Use top_p, min_p or top_k instead."
_TEXT_ONLY = "octavo writes text only"
NOT_WRITING = "This model does not generate text: it is for embeddings, classification or scoring."
NO_POOLING = "the model generates text; embeddings, classes and scores need another kind of model"

FIELDS: dict[str, Foreign] = {
    "user": _ignored("whose request it is; keys tell tenants apart"),
    "safety_identifier": _ignored("as user"),
    "metadata": _ignored("notes for OpenAI's dashboard"),
    "store": _ignored("answers of chat are not kept"),
    "service_tier": _ignored("there is one"),
    "prediction": _ignored("a hint for speed"),
    "prompt_cache_key": _ignored("prefixes are found by content; cache_salt keeps them apart"),
    "prompt_cache_retention": _ignored("blocks are kept while there is room"),
    "session_id": _ignored("there is one replica"),
    "add_response_role": _ignored("the role is always sent"),
    "verbosity": _ignored("a hint to OpenAI's own models"),
    "normalize": Foreign((None,), "it was removed; use `use_activation` instead"),
    "functions": _refused("use tools"),
    "function_call": _refused("use tools and tool_choice"),
    "modalities": _refused(_TEXT_ONLY, ["text"]),
    "audio": _refused(_TEXT_ONLY),
    "web_search_options": _refused("octavo reaches no network"),
    "chat_template": _refused(
        "a template never comes from a request; the operator sets one with --chat-template"
    ),
    "ec_transfer_params": _refused("there is no encoder cache connector"),
    "watermarking": _refused("there are no watermarks"),
    "return_token_offsets": _refused("offsets are not known; logprobs have text_offset"),
}
"""Fields of requests over HTTP."""

SAMPLING = {
    "top_ema_p": Foreign((None, 0, 0.0), TOP_EMA),
    "top_ema_d": Foreign((None, 0, 0.0), TOP_EMA),
    "multiple_stop_sequences": Foreign(
        (None, False, True), "give True or False; `stop` takes several in any case."
    ),
    "watermarking": Foreign((None,), "watermarks are not there yet; logits_processors can add one."),
    "trace_decode_token_ids": Foreign((None,), "octavo keeps no trace of decoding: leave it None."),
    "skip_clone": Foreign((None, False, True), "give True or False; parameters are copied in any case."),
}
"""Keywords of SamplingParams."""

ROUTES = {"/v1/audio/speech": _TEXT_ONLY, "/v1/images/generations": _TEXT_ONLY}
"""Paths of the HTTP server."""
