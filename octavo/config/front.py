"""How requests are taken in and let out."""

from dataclasses import dataclass

from octavo.config.option import Concern, option


@dataclass(frozen=True, kw_only=True)
class FrontConfig(metaclass=Concern):
    """What happens to a request before and after the engine."""

    max_num_queued_reqs: int = option(
        -1,
        "Sequences beyond max_num_seqs that may wait; more are refused at once; 0 = no request is taken, "
        "-1 = 4 x max_num_seqs in a server, unbounded in Python.",
    )
    max_num_queued_tokens: int = option(
        0, "Prompt tokens that may wait to be computed; requests beyond are refused at once; 0 = unbounded."
    )
    strict_request_ids: bool = option(
        False, "Refuse a request id that an open request has; off: both run, an abort ends both."
    )
    tool_call_parser: str = option(
        "auto",
        "Format of tool calls in the model's text; auto = the one its chat template shows; empty = none.",
    )
    tool_strict_level: str = option(
        "auto",
        "What calls of tools are held to that the model need not make: auto = the schemas of tools that say "
        "strict; function = the names of any tools too; parameter = the schemas of all.",
        ("auto", "function", "parameter"),
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its reasoning; auto = what its chat template speaks of; empty = not at all.",
    )
    tool_prompt: str = option(
        "auto",
        "Whether tools are told in words, in Hermes' form, to a model whose chat template knows none.",
        ("auto", "never"),
    )
    chat_template_content_format: str = option(
        "auto",
        "Form of a message's content for the chat template: string, openai (a list of parts); auto = the one "
        "that it reads.",
        ("auto", "string", "openai"),
    )
    stream_interval: int = option(
        1, "Tokens that a streamed output holds at least; the first and the last come at once."
    )
    shutdown_timeout: float = option(
        0.0, "Seconds that a shutdown waits for open requests, refusing new ones; 0 = end them at once."
    )
    stall_timeout: float = option(
        30.0,
        "Seconds without a step, though one is due, or without a sign of life, after which the engine core "
        "is killed; ten times as many while it computes, sixty on a CPU; 0 = never.",
    )
