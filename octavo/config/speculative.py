"""`speculative_config`: how the next tokens are guessed, and how many at most.

{"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_min": 3}
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict

from octavo.base.errors import ConfigError, Unsupported
from octavo.config.checkpoint import Checkpoint

MAX_DRAFTS = 128
"""Tokens that may be guessed ahead in one step."""
LOOKUPS = ("ngram", "suffix", "jump_ahead")
HEADS = ("medusa", "mlp_speculator")
HIDDEN_STATES = ("eagle", "eagle3", "mtp", "dflash")
"""Layers with a cache that read the model's hidden states."""
CUSTOM = "custom_class"
"""A drafter of the user's own, whose class is named as the model."""
WITH_WEIGHTS = ("draft_model", *HEADS, *HIDDEN_STATES, CUSTOM)
BY_WORKERS = (*WITH_WEIGHTS, "ngram_gpu")
"""Guess on the device behind each step; ngram_gpu looks up the last tokens there."""
METHODS = (*LOOKUPS, *BY_WORKERS)
_MODEL = (
    f"The methods that take a model: {', '.join(WITH_WEIGHTS)}. Those without one have to be named: "
    f"{', '.join((*LOOKUPS, 'ngram_gpu', 'mtp'))}."
)
_SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

_NOT_OURS = {
    "drafts are loaded and computed as the model is, by its options": (
        "enforce_eager moe_backend attention_backend draft_load_config"
    ),
    "please pass 'draft_tensor_parallel_size' instead": "tensor_parallel_size",
    "no code comes from a hub": "code_revision",
    "octavo has no such choice": (
        "index_share_for_mtp_iteration disable_eagle_block_drop use_local_argmax_reduction"
    ),
}
"""Keys of vLLM's that are refused unless they ask for nothing, by the reason."""


class SpeculativeConfig(TypedDict, total=False):
    """The option's keys under vLLM's names; a plain dict."""

    method: str
    model: str
    revision: str
    quantization: str
    draft_tensor_parallel_size: int
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
    rejection_sample_method: str
    synthetic_acceptance_rates: list[float]
    synthetic_acceptance_length: float
    draft_sample_method: str
    num_speculative_tokens_per_batch_size: list[list[int]]
    max_model_len: int
    kv_cache_dtype: str
    use_heterogeneous_vocab: bool
    enable_adaptive_verification: bool
    disable_padded_drafter_batch: bool
    parallel_drafting: bool


class Speculation(NamedTuple):
    """What the option asks for.

    method:       one of METHODS
    most:         draft tokens of a request in one step
    least_match:  last tokens that a guess must agree with
    most_match:   last tokens that are compared
    most_cached:  earlier outputs that are searched too; 0 = none but the request's own tokens
    most_factor:  draft tokens per matched token
    least_chance: of being right, below which a token is not guessed
    draws:        drafters with weights draw with the model's noise; otherwise they are greedy
    by_batch:     (from, to, most) draft tokens of a request in steps of so many requests
    rates:        how often the 1st, 2nd, … draft token is taken, right or wrong; () = when it is right
    adapts:       fewer are verified, or none, where more do not pay
    rejects:      drawn drafts are kept by their chances: "standard" or "block"; "" = where they are right
    """

    method: str
    most: int
    least_match: int = 0
    most_match: int = 0
    most_cached: int = 0
    most_factor: float = 0.0
    least_chance: float = 0.0
    draws: bool = True
    by_batch: tuple[tuple[int, int, int], ...] = ()
    rates: tuple[float, ...] = ()
    adapts: bool = True
    rejects: str = ""

    @property
    def num_ahead(self) -> int:
        """Return how many places behind a step a drafter writes to: masks stand one behind their guesses."""
        return (self.most + (self.method == "dflash")) if self.method in BY_WORKERS else 0

    def most_of(self, num_requests: int) -> int:
        """Return the most draft tokens of a request in a step of so many requests."""
        rows = (most for least, last, most in self.by_batch if least <= num_requests <= last)
        return min(self.most, next(rows, self.most))


def with_short(config: Mapping[str, Any], short: object) -> dict[str, Any]:
    """Return the option with what the short ones beside it say. Raises ConfigError for what both say."""
    config = {str(name).replace("-", "_"): value for name, value in config.items()}
    for name, key in _SHORT.items():
        if (value := getattr(short, name)) not in ("", -1):
            if key in config:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} and --speculative-config[{key!r}] are mutually exclusive.")
            config[key] = value
    return config


def names_class(model: str) -> bool:
    """Return True for what can only be a class of the user's own, package.module.Class."""
    parts = model.split(".")
    return len(parts) > 1 and all(map(str.isidentifier, parts))


def speculation(config: Mapping[str, Any]) -> Speculation | None:
    """Return what the option asks for, None for nothing. Raises ConfigError, Unsupported."""
    if not config:
        return None
    _check_keys(config)
    method = config.get("method") or "draft_model"
    method = "mtp" if method.endswith("_mtp") else method
    if method not in METHODS:
        raise Unsupported(f"Unsupported speculative method: {method!r}. Use {' or '.join(METHODS)}.")
    if method in WITH_WEIGHTS and method != "mtp" and not config.get("model"):
        raise ConfigError(f"num_speculative_tokens was provided but without speculative model. {_MODEL}")
    if method not in WITH_WEIGHTS and config.get("model"):
        raise ConfigError(f"speculative_config: method={method!r} takes no model. {_MODEL}")
    if type(given := config.get("num_speculative_tokens")) is int and given <= 0:
        raise ConfigError(f"Expected num_speculative_tokens to be greater than zero ({given}).")
    most = _whole(config, "num_speculative_tokens", 4 if method in BY_WORKERS else 24, MAX_DRAFTS)
    draws = _choice(config, "draft_sample_method", ("probabilistic", "greedy")) == "probabilistic"
    how = _choice(config, "rejection_sample_method", ("equality", "standard", "block", "synthetic"))
    rates = _rates(config, most, is_synthetic=how == "synthetic")
    rejects = how if draws and method in WITH_WEIGHTS and how in ("standard", "block") else ""
    adapts = config.get("enable_adaptive_verification") is not False
    by_batch = _by_batch(config)
    common = Speculation(
        method, most, draws=draws, by_batch=by_batch, rates=rates, adapts=adapts, rejects=rejects
    )
    if method.startswith("ngram"):
        least_match, most_match = _lookup(config)
        return common._replace(least_match=least_match, most_match=most_match)
    if method != "suffix":
        return common
    return common._replace(
        least_match=2,
        most_match=_whole(config, "suffix_decoding_max_tree_depth", 24, 1 << 10),
        most_cached=_whole(config, "suffix_decoding_max_cached_requests", 10_000, 1 << 20, least=0),
        most_factor=_number(config, "suffix_decoding_max_spec_factor", 1.0, 100.0),
        least_chance=_number(config, "suffix_decoding_min_token_prob", 0.1, 1.0, or_zero=True),
    )


def _choice(config: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    if (given := config.get(name) or allowed[0]) not in allowed:
        raise Unsupported(
            f"speculative_config: {name}={given!r} is not supported. Use {' or '.join(allowed)}."
        )
    return str(given)


def _rates(config: Mapping[str, Any], most: int, *, is_synthetic: bool) -> tuple[float, ...]:
    """Return how often drafts are taken whatever they are: for benchmarks, and with wrong texts."""
    rates, length = (config.get(f"synthetic_acceptance_{what}") for what in ("rates", "length"))
    if is_synthetic != ((rates is None) != (length is None)):
        raise ConfigError(
            "rejection_sample_method='synthetic' needs either synthetic_acceptance_rates or "
            "synthetic_acceptance_length, and nothing else takes them."
        )
    if length is not None:
        if type(length) not in (int, float) or not 1 <= length <= 1 + most:
            raise ConfigError(f"synthetic_acceptance_length must be from 1 to {1 + most}, got {length!r}.")
        rates = [min(1.0, max(0.0, length - 1 - place)) for place in range(most)]
    rates = rates or []
    is_list = isinstance(rates, list | tuple) and all(type(rate) in (int, float) for rate in rates)
    if not is_list or len(rates) > most or any(a < b for a, b in pairwise((1, *rates, 0))):
        raise ConfigError(
            f"synthetic_acceptance_rates holds at most {most} numbers from 1 to 0, none above the one before "
            f"it, got {rates!r}."
        )
    return tuple(map(float, rates))


def _by_batch(config: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """Return the rows [from, to, most] of the table by requests in a step."""
    name = "num_speculative_tokens_per_batch_size"
    rows = config.get(name) or []
    for row in rows if isinstance(rows, list | tuple) else [rows]:
        is_row = isinstance(row, list | tuple) and len(row) == 3 and all(type(x) is int for x in row)
        if not is_row or not (1 <= row[0] <= row[1] and 0 <= row[2] <= MAX_DRAFTS):
            raise ConfigError(
                f"{name} holds [from, to, tokens] with 1 <= from <= to and 0 <= tokens <= {MAX_DRAFTS}, "
                f"got {row!r}."
            )
    return tuple((row[0], row[1], row[2]) for row in rows)


def method_of(draft: Mapping[str, Any]) -> str:
    """Return the method that a draft's config.json tells of."""
    kind = str(draft.get("speculators_model_type") or draft.get("model_type"))
    names = " ".join(map(str, draft.get("architectures") or ())).lower()
    if kind in METHODS:
        return kind
    return next((method for method in ("dflash", "eagle3", "eagle") if method in names), "draft_model")


def flattened(draft: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draft's config.json without the levels of the speculators format and of the first EAGLE's."""
    inner = draft.get("transformer_layer_config") or draft.get("model") or {}
    defaults = {"norm_before_residual": True} if draft.get("speculators_model_type") else {}
    return {**defaults, **(inner if isinstance(inner, dict) else {}), **draft}


def check_draft(
    config: Mapping[str, Any], method: str, draft: Checkpoint, target: Checkpoint, max_model_len: int
) -> None:
    """Raise ConfigError for a draft that was made for another kind of model, or with a cache of its own."""
    if method in HEADS:
        return
    if draft.vocab_size != target.vocab_size and not config.get("use_heterogeneous_vocab"):
        raise ConfigError(
            "Target and draft model should have the same vocabulary size. Target model vocab_size="
            f"{target.vocab_size}. Draft model vocab_size={draft.vocab_size}. With "
            "use_heterogeneous_vocab=true they need only have many tokens in common."
        )
    size = draft.config.get("target_hidden_size") or draft.embedding_size
    if method in HIDDEN_STATES and size != target.embedding_size:
        raise ConfigError(
            f"The {method} head was made for another model: it reads hidden states of {size}, not of "
            f"{target.embedding_size}."
        )
    if method == "draft_model" and draft.max_position_embeddings < max_model_len:
        raise ConfigError(
            f"The draft model takes {draft.max_position_embeddings} tokens, fewer than max_model_len="
            f"{max_model_len}: lower max_model_len, or use another model."
        )


def _lookup(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least and the most tokens that are looked up."""
    given = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if config.get(name) is not None]
    least = _whole(config, "prompt_lookup_min", 3 if len(given) != 1 else config[given[0]], 1 << 10)
    most = _whole(config, "prompt_lookup_max", max(least, 16), 1 << 10)
    if least > most:
        raise ConfigError(f"prompt_lookup_min={least} must be <= prompt_lookup_max={most}.")
    return least, most


def _check_keys(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that nobody knows, Unsupported for what is not built."""
    if config.get("parallel_drafting") and config.get("method") != "dflash":
        raise Unsupported(
            "speculative_config: parallel_drafting=True is not supported: heads guess token after token."
        )
    reasons = {name: reason for reason, names in _NOT_OURS.items() for name in names.split()}
    for name, reason in reasons.items():
        if config.get(name) not in (None, False, "auto"):
            raise Unsupported(f"speculative_config: {name}={config[name]!r} is not supported: {reason}.")
    if unknown := sorted(set(config) - set(SpeculativeConfig.__annotations__) - set(reasons)):
        known = ", ".join(SpeculativeConfig.__annotations__)
        raise ConfigError(f"speculative_config has no {', '.join(map(str, unknown))}. Known: {known}.")
    for name in ("method", "model", "revision", "quantization"):
        if not isinstance(config.get(name) or "", str):
            raise ConfigError(f"speculative_config: {name} must be a text, got {config[name]!r}.")
    for name, kind in SpeculativeConfig.__annotations__.items():
        if kind is bool and config.get(name) not in (None, True, False):
            raise ConfigError(f"speculative_config: {name} must be true or false, got {config[name]!r}.")
    if config.get("use_heterogeneous_vocab") and config.get("method") not in (None, "draft_model"):
        raise ConfigError("speculative_config: use_heterogeneous_vocab works with method='draft_model' only.")


def _whole(config: Mapping[str, Any], name: str, default: int, most: int, least: int = 1) -> int:
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")
    return value


def _number(
    config: Mapping[str, Any], name: str, default: float, most: float, *, or_zero: bool = False
) -> float:
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not (0 < value <= most or (or_zero and value == 0)):
        least = "from 0" if or_zero else "above 0 and up"
        raise ConfigError(f"{name} must be a number {least} to {most:g}, got {value!r}.")
    return float(value)
