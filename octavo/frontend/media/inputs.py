"""`MediaInputs`: the images and the like that come with a prompt, as users write them, sorted by modality."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import RequestError, wrong

MODALITIES = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class MediaURL:
    """Says where an item is; still to be fetched."""

    url: str


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """The items of a prompt by modality, in the order of their markers.

    items: an object of Pillow's, an array, frames, encoded bytes, a MediaURL, embeddings, or None for what
           its uuid names
    uuids: as many names, None where there is none; what has a name is not read again
    """

    items: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uuids: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_inputs(data: Any, uuids: Any, kwargs: Any) -> MediaInputs | None:
    """Read the three entries of a prompt that belong to media; None for no items. Raises RequestError."""
    for name, given in (
        ("multi_modal_data", data),
        ("multi_modal_uuids", uuids),
        ("mm_processor_kwargs", kwargs),
    ):
        if given is not None and not isinstance(given, Mapping):
            raise wrong(name, f"must be a dict, got {type(given).__name__}")
    items = {
        modality: (_videos if modality == "video" else _listed)(given)
        for modality, given in (data or {}).items()
    }
    names = {modality: _listed(given) for modality, given in (uuids or {}).items()}
    for modality in items.keys() | names.keys():
        if modality not in MODALITIES:
            raise RequestError(
                f"Unsupported modality: {modality}. Supported: {', '.join(MODALITIES)}.", "multi_modal_data"
            )
    for modality, listed in names.items():
        given = items.setdefault(modality, [None] * len(listed))
        if len(given) != len(listed):
            raise RequestError(
                f"multi_modal_uuids for {modality} must have same length as multi_modal_data: got "
                f"{len(listed)} uuids vs {len(given)} items.",
                "multi_modal_uuids",
            )
        if not all(name is None or (isinstance(name, str) and name) for name in listed):
            raise wrong("multi_modal_uuids", "must hold non-empty strings, or None")
    items = {modality: given for modality, given in items.items() if given}
    return MediaInputs(items, names, kwargs or {}) if items else None


def _listed(given: Any) -> list[Any]:
    """Return the items that one value stands for: a list of them, a batch of embeddings, or one."""
    if given is None:
        return []
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float):
        return [given]  # samples and their rate
    if isinstance(given, list | tuple):
        return list(given)
    if is_tensor(given) and given.ndim == 3:
        return list(given)
    return [given]


def _videos(given: Any) -> list[Any]:
    """Return the videos that one value stands for: one of frames, with or without what is known of them, or a
    list of videos.
    """
    is_told = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    is_list = isinstance(given, list | tuple) and bool(given)
    of_frames = is_list and all(hasattr(one, "convert") or getattr(one, "ndim", 0) == 3 for one in given)
    return [given] if is_told or of_frames else _listed(given)


def is_tensor(value: Any) -> bool:
    """Return True for a tensor of torch, which is not imported for the question."""
    return hasattr(value, "detach")
