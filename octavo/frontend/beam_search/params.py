"""What a user asks of beam search, and what he gets: `BeamSearchParams`, `BeamSearchOutput`. Public.

vLLM's names; num_beam_groups, diversity_penalty and early_stopping are Hugging Face's. The same search can be
asked for by SamplingParams(use_beam_search=True, best_of=width, temperature=0); BeamSearchParams become that.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.base.errors import RequestError, Unsupported, wrong
from octavo.frontend.beam_search.rules import BeamRules, EarlyStopping
from octavo.frontend.outputs.logprobs import PositionLogprobs
from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import EngineRequest
from octavo.messages.sampling import SamplingParams

MAX_BEAM_WIDTH = 64
"""A step of a search compares twice as many candidates of each beam, between two tokens of everybody."""
MAX_LENGTH_PENALTY = 16.0
_OPTIONS = {"length_penalty": 1.0, "early_stopping": False, "num_beam_groups": 1, "diversity_penalty": 0.0}
_COMBINABLE = frozenset({
    *_OPTIONS,
    *("n", "best_of", "use_beam_search", "temperature", "seed", "max_tokens", "ignore_eos", "stop_token_ids"),
    *("logprobs", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_reading_prefix_cache"),
    *("extra_args", "timeout_s"),
})  # fmt: skip
"""Fields of SamplingParams that mean something, or no harm, in a search."""


_SHARED = frozenset(SamplingParams.__struct_fields__)


@dataclass(slots=True)
class BeamSearchParams:
    """How to search. Raises RequestError for a wrong value."""

    beam_width: int
    """Beams kept, and sequences returned."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Must be 0: nothing is drawn."""
    length_penalty: float = 1.0
    """Beams are ranked by cum_logprob / num_output_tokens ** length_penalty: above 0 favours long ones."""
    include_stop_str_in_output: bool = False
    """Keep the end token's text."""
    structured_outputs: Any = None
    """Refused: the search ranks what the model itself would write."""
    skip_special_tokens: bool = True
    watermarking: Any = None
    """Refused."""
    early_stopping: EarlyStopping = False
    """True: stop when beam_width beams have finished; False: when a better one is unlikely to come; "never":
    when it is impossible."""
    num_beam_groups: int = 1
    """Groups of beams that shun one another's tokens; divides beam_width."""
    diversity_penalty: float = 0.0
    """Subtracted from a token's logprob for each beam of the earlier groups that took it."""

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise wrong(
                "beam_width", f"must be an integer from 1 to {MAX_BEAM_WIDTH}, got {self.beam_width!r}"
            )
        if self.watermarking is not None:
            raise Unsupported("watermarking is not supported: watermarks are not there yet.")
        check_beam_search(self.to_sampling_params())

    def to_sampling_params(self, logprobs: int | None = None) -> SamplingParams:
        """The same search as SamplingParams; logprobs: how many of each position to show."""
        shared = {name: getattr(self, name) for name in self.__slots__ if name in _SHARED}
        width = self.beam_width
        return SamplingParams(n=width, best_of=width, use_beam_search=True, logprobs=logprobs, **shared)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """Of prompt and output, the end token included."""
    logprobs: list[PositionLogprobs]
    """Of each output position: the chosen token, then the most likely ones."""
    cum_logprob: float = 0.0
    """Sum over the output's tokens."""
    text: str | None = None
    """Of prompt and output; None without a tokenizer."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

    @classmethod
    def from_request(
        cls, output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
    ) -> "BeamSearchOutput":
        """From the output of a request made with `params.to_sampling_params`."""
        prompt_ids = output.prompt_token_ids or []
        return cls([_sequence(beam, prompt_ids, params, tokenizer) for beam in output.outputs])


def check_beam_search(params: SamplingParams) -> None:
    """Refuse values of beam search that are wrong, that have no effect, or that cannot be combined."""
    if not params.use_beam_search:
        _refuse_idle_options(params)
        return
    if not params.greedy:
        raise wrong("temperature", f"must be 0 when using beam search, got {params.temperature}")
    _check_values(params)
    plain = SamplingParams(temperature=0.0)
    for name in params.__struct_fields__:
        if name not in _COMBINABLE and getattr(params, name) not in (getattr(plain, name), [], {}):
            raise wrong(
                name,
                "cannot be used with beam search, which ranks the model's own logprobs: leave it "
                "out, or sample with use_beam_search=False",
            )


def first_step(
    request: EngineRequest, params: SamplingParams, logprobs_mode: str
) -> tuple[EngineRequest, BeamRules]:
    """Return the request of a beam search's first token and its most likely alternatives, and the rules.

    request: for the whole output, if it were sampled. Raises RequestError.
    """
    if logprobs_mode != "raw_logprobs":
        raise RequestError(
            f"Beam search needs an engine with logprobs_mode=raw_logprobs; this one has {logprobs_mode}.",
            "use_beam_search",
        )
    replace = msgspec.structs.replace
    rules = beam_rules(params, request.limits.eos_token_ids, request.limits.max_tokens)
    num_logprobs = max(rules.num_candidates, params.logprobs or 0)
    task = replace(params, n=1, best_of=None, use_beam_search=False, max_tokens=1, logprobs=num_logprobs)
    step = replace(
        request,
        spec=replace(request.spec, task=task),
        limits=replace(request.limits, max_tokens=1),
        sharing=replace(request.sharing, hold=True),
    )
    return step, rules


def beam_rules(params: SamplingParams, eos_token_ids: Iterable[int], max_tokens: int) -> BeamRules:
    """The rules of a search whose parameters have been checked."""
    return BeamRules(
        width=_width(params),
        max_tokens=max_tokens,
        end_ids=frozenset(eos_token_ids) | frozenset(params.stop_token_ids or ()),
        length_penalty=params.length_penalty,
        early_stopping="never" if params.early_stopping == "never" else bool(params.early_stopping),
        num_groups=params.num_beam_groups,
        diversity_penalty=params.diversity_penalty,
        num_shown=params.logprobs or 0,
    )


def _width(params: SamplingParams) -> int:
    return params.best_of or params.n


def _refuse_idle_options(params: SamplingParams) -> None:
    for name, default in _OPTIONS.items():
        if getattr(params, name) != default:
            raise wrong(
                name,
                f"is not effective and must be the default value of {default!r} when not using beam search",
            )


def _check_values(params: SamplingParams) -> None:
    width, groups = _width(params), params.num_beam_groups
    if width > MAX_BEAM_WIDTH:
        raise RequestError(
            f"A beam search has at most {MAX_BEAM_WIDTH} beams (n, best_of), got {width}.", "best_of"
        )
    if not _is_number(params.length_penalty) or abs(params.length_penalty) > MAX_LENGTH_PENALTY:
        raise wrong(
            "length_penalty",
            f"must be in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}], got {params.length_penalty!r}",
        )
    if params.early_stopping is not True and params.early_stopping not in (False, "never"):
        raise RequestError(
            f'early_stopping must be True, False or "never", got {params.early_stopping!r}.', "early_stopping"
        )
    if type(groups) is not int or groups < 1 or width % groups:
        raise wrong(
            "num_beam_groups", f"must be an integer that divides the beam width of {width}, got {groups!r}"
        )
    if not _is_number(params.diversity_penalty) or params.diversity_penalty < 0:
        raise wrong(
            "diversity_penalty", f"must be a finite number of at least 0, got {params.diversity_penalty!r}"
        )
    if (groups > 1) != (params.diversity_penalty > 0):
        raise RequestError(
            f"num_beam_groups ({groups}) and diversity_penalty ({params.diversity_penalty:g}) go together: "
            "groups without a penalty would be identical, a penalty needs groups.",
            "diversity_penalty",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _sequence(
    beam: CompletionOutput, prompt_ids: list[int], params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    tokens = [*prompt_ids, *beam.token_ids]
    shown = tokens[:-1] if beam.finish_reason == "stop" and not params.include_stop_str_in_output else tokens
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=list(beam.logprobs or ()),
        cum_logprob=beam.cumulative_logprob or 0.0,
        text=None if tokenizer is None else tokenizer.decode(shown, params.skip_special_tokens),
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
    )
