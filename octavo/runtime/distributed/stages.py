"""`cut_layers` divides a stack of layers into the stages of a pipeline. Asked by the loader."""

from functools import cache
from itertools import accumulate

from octavo.base.errors import ConfigError


def cut_layers(costs: list[int], head_cost: int, num_stages: int) -> list[range]:
    """Return the layers of each stage, so that the costliest stage costs as little as can be.

    costs: of each layer; head_cost: what the last stage has besides. Raises ConfigError for too many stages.
    """
    if num_stages > len(costs):
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the {len(costs)} layers of the model."
        )
    until = [0, *accumulate(costs)]
    until[-1] += head_cost

    @cache
    def best(start: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest cost and the ends of `count` stages from layer `start` on."""
        if count == 1:
            return until[-1] - until[start], (len(costs),)
        cuts = []
        for end in range(start + 1, len(costs) - count + 2):
            largest, ends = best(end, count - 1)
            cuts.append((max(largest, until[end] - until[start]), (end, *ends)))
        return min(cuts)

    ends = best(0, num_stages)[1]
    return [range(*bounds) for bounds in zip((0, *ends), ends, strict=False)]
