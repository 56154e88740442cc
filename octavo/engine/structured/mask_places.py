"""`MaskPlaces`: where the workers keep which mask, so that one that many rows and steps need is sent once.

Owned by `matchers`. Masks are known by their object: equal ones of a back end are one.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Key = tuple[int, Sequence[int]]
"""The id of a mask, and tokens that are taken out of it."""


class Kept(NamedTuple):
    """The places of a step's masks; those that are new, and where they go."""

    places: dict[Key, int]
    new: list[Key]
    new_places: list[int] | None
    """None: the workers have no room for all masks of the step; places count those of `new`."""


class MaskPlaces:
    """Gives the places of masks that were not used for the longest time to new ones."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._known: OrderedDict[Key, tuple[int, np.ndarray]] = OrderedDict()
        """By use, the latest last. Masks are held: their ids are not given to others."""

    def take(self, masks: Mapping[Key, np.ndarray]) -> Kept:
        """Return where the masks of a step are."""
        if len(masks) > self._num_places:
            return Kept({key: place for place, key in enumerate(masks)}, list(masks), None)
        known, new = self._known, [key for key in masks if key not in self._known]
        for key in masks:
            if key in known:
                known.move_to_end(key)
        for key in new:
            place = len(known) if len(known) < self._num_places else known.popitem(last=False)[1][0]
            known[key] = place, masks[key]
        return Kept({key: known[key][0] for key in masks}, new, [known[key][0] for key in new])
