"""What stands for the items of a prompt takes the places of their markers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base.errors import RequestError
from octavo.frontend.media.processors.media import MediaProcessor
from octavo.messages.media import Features, MediaItem


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item without its place. tokens: what stands for it in a prompt"""

    modality: str
    key: bytes
    tokens: list[int]
    features: dict[str, Features]

    @property
    def num_bytes(self) -> int:
        """Return the size of what it holds."""
        return sum(features.num_bytes for features in self.features.values()) + 8 * len(self.tokens)


def place_items(
    processor: MediaProcessor, ids: list[int], prepared: Sequence[Prepared], longest: int
) -> tuple[list[int], list[MediaItem]]:
    """Return the tokens of a prompt with what stands for its items, and these. Raises RequestError.

    longest: tokens of an item that one step can compute
    """
    ids = _without_frames(processor, ids)
    waiting = _by_modality(processor, ids, prepared)
    placed, items = list[int](), list[MediaItem]()
    for token in ids:
        modality = processor.markers.get(token)
        if modality is None:
            if items and items[-1].end == len(placed) and (both := processor.joined(placed[-1], token)):
                placed[-1] = both
            else:
                placed.append(token)
            continue
        item = waiting[modality].popleft()
        tokens = item.tokens
        if processor.sees_itself and len(tokens) > longest:
            raise RequestError(
                f"An image takes {len(tokens)} tokens, which one step computes together: at most {longest} "
                "with these max_num_batched_tokens and max_num_seqs.",
                "multi_modal_data",
            )
        if placed and (both := processor.joined(placed[-1], tokens[0])):
            placed[-1], tokens = both, tokens[1:]
        marker, sees_itself = processor.placeholder(modality), processor.sees_itself
        start, key, features = len(placed), item.key, item.features
        items.append(MediaItem(modality, start, len(tokens), marker, key, features, sees_itself))
        placed += tokens
    return placed, items


def _by_modality(
    processor: MediaProcessor, ids: list[int], prepared: Sequence[Prepared]
) -> dict[str, deque[Prepared]]:
    """Return the items of each modality in their order, as many as there are markers. Raises RequestError."""
    waiting = {modality: deque[Prepared]() for modality in processor.markers.values()}
    for item in prepared:
        waiting[item.modality].append(item)
    for marker, modality in processor.markers.items():
        if (num_markers := ids.count(marker)) != (given := len(waiting[modality])):
            raise RequestError(
                f"The prompt has {num_markers} {modality} placeholder(s), but {given} {modality}(s) are "
                f"given. Each {modality} needs one.",
                "multi_modal_data",
            )
    return waiting


def _without_frames(processor: MediaProcessor, ids: list[int]) -> list[int]:
    """Return the prompt without the tokens around markers of videos that come with what replaces them."""
    if processor.video_frame is None or processor.video_id not in ids:
        return ids
    before, after = processor.video_frame
    kept: list[int] = []
    for token in ids:
        if token == after and kept[-2:] == [before, processor.video_id]:
            del kept[-2]
        else:
            kept.append(token)
    return kept
