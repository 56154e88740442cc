"""Fields that well-known programs send to every server: what each becomes here. Used by `body`.

A field with a meaning here is translated; the request's own field counts more. The others pass without an
effect, with one line in the log for each name. Unknown fields of any other name stay errors.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.base.log import get_logger

logger = get_logger(__name__)
_MAX_NOTES = 256
_noted: set[tuple[str, str]] = set()

Fields = dict[str, Any]


def translated(fields: Fields, known: Iterable[str]) -> Fields:
    """The fields of a body, with those of other programs as what they mean among the `known` ones."""
    known = set(known)
    foreign = (fields.keys() & _ALL) - known
    if not foreign or "temperature" not in known:
        return fields
    own = {name: value for name, value in fields.items() if name not in foreign}
    for name in sorted(foreign, key=list(fields).index):
        if name not in _MEANINGS:
            note_once("field", name, "is another program's and has no effect here.")
        elif fields[name] is not None:
            for meant, value in _MEANINGS[name](fields[name]).items():
                _give(own, meant, value, known)
    return own


def note_once(what: str, name: str, text: str) -> None:
    """A line in the log, unless it was there before."""
    if (what, name) not in _noted and len(_noted) < _MAX_NOTES:
        _noted.add((what, name))
        logger.warning("The %s %r of a request %s", what, name, text)


def _give(own: Fields, name: str, value: Any, known: set[str]) -> None:
    if name == "options" and isinstance(value, dict):
        inner = {key: entry for key, entry in value.items() if key != "options"}
        for key, entry in translated(inner, known).items():
            _give(own, key, entry, known)
    elif name in known and isinstance(value, dict) and isinstance(own.get(name), dict):
        own[name] = value | own[name]
    elif name in known and own.get(name) is None:
        own[name] = value


def _as(name: str) -> Callable[[Any], Fields]:
    return lambda value: {name: value}


def _most(value: Any) -> Fields:
    """A number of tokens, where -1 and -2 are as many as there is room for."""
    return {"max_tokens": None if value in (-1, -2) else value}


def _thinking(value: Any) -> Fields:
    """DeepSeek's and Anthropic's object, Ollama's word, or a flag."""
    match value:
        case bool():
            return {"chat_template_kwargs": {"enable_thinking": value, "thinking": value}}
        case str():
            return {"reasoning_effort": value}
        case {"type": kind}:
            budget = {"thinking_token_budget": value.get("budget_tokens")}
            return _thinking(kind != "disabled") | (budget if kind != "disabled" else {})
    return {}


def _reasoning(value: Any) -> Fields:
    if not isinstance(value, Mapping):
        return {}
    told = {"reasoning_effort": value.get("effort"), "thinking_token_budget": value.get("max_tokens")}
    if value.get("exclude"):
        told["include_reasoning"] = False
    if isinstance(is_on := value.get("enabled"), bool):
        told |= _thinking(is_on)
    return told


def _form(value: Any) -> Fields:
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    return {"structured_outputs": {"json": value}} if value else {}


def _grammar(value: Any) -> Fields:
    return {"structured_outputs": {"grammar": value}} if value else {}


def _usage(value: Any) -> Fields:
    return {"stream_options": {"include_usage": True}} if value == {"include": True} else {}


_MEANINGS: dict[str, Callable[[Any], Fields]] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict"), _most),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), _as("repetition_penalty")),
    **dict.fromkeys(("stopping_strings", "stop_sequence", "stop_sequences", "stop_strings"), _as("stop")),
    **dict.fromkeys(("enable_thinking", "thinking", "think"), _thinking),
    **dict.fromkeys(("format", "json_schema"), _form),
    **dict.fromkeys(("grammar", "grammar_string"), _grammar),
    "add_bos_token": _as("add_special_tokens"),
    "ban_eos_token": _as("ignore_eos"),
    "do_sample": lambda value: {"temperature": 0} if value is False else {},
    "options": _as("options"),
    "reasoning": _reasoning,
    "sampler_seed": lambda value: {} if value == -1 else {"seed": value},
    "usage": _usage,
}
"""What a field says in octavo's words, by its name."""

_WITHOUT_EFFECT = {
    "Ollama, and Open WebUI with its options": """
        chat_id f16_kv features filter_ids keep_alive low_vram main_gpu mirostat mirostat_eta
        mirostat_tau num_batch num_ctx num_gpu num_keep num_thread numa penalize_newline raw
        repeat_last_n template tfs_z typical_p use_mlock use_mmap variables vocab_only""",
    "SillyTavern, KoboldAI, text-generation-webui": """
        adaptive_decay adaptive_target api_server api_type banned_strings banned_tokens can_abort
        char_name chat_completion_source custom_token_bans dry_allowed_length dry_base
        dry_multiplier dry_penalty_last_n dry_range dry_sequence_breakers dynamic_temperature
        dynatemp_exponent dynatemp_high dynatemp_low dynatemp_range encoder_repetition_penalty
        epsilon_cutoff eta_cutoff group_names guidance_scale legacy_api max_context_length
        max_tokens_second min_keep min_length mirostat_mode negative_prompt no_repeat_ngram_size
        nsigma num_beams penalty_alpha rep_pen_range rep_pen_slope repetition_decay
        repetition_penalty_range request_images sampler_order sampler_priority samplers
        show_thoughts smoothing_curve smoothing_factor speculative_ngram temperature_last tfs
        token_healing top_a top_n_sigma trim_stop truncation_length typical use_default_badwordsids
        use_sysprompt user_name xtc_probability xtc_threshold""",
    "llama.cpp and its page": """
        backend_sampling cache_prompt chat_format grammar_lazy grammar_triggers id_slot input_extra
        n_discard n_indent n_keep n_probs parse_tool_calls post_sampling_probs reasoning_format
        reasoning_in_content response_fields return_progress return_tokens t_max_predict_ms
        thinking_forced_open timings_per_token typ_p""",
    "OpenRouter": "debug models plugins provider route transforms",
}
"""Names by the programs that send them."""
_ALL = _MEANINGS.keys() | {name for names in _WITHOUT_EFFECT.values() for name in names.split()}
