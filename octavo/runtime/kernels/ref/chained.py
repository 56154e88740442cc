"""References of the kernels of chained steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.messages.step import UNTOLD
from octavo.runtime.kernels.chained import Ahead, ChainKernels, ChainRows, slots_of


def move_rows(
    given: ChainRows,
    lengths: Tensor,
    kept_ids: Tensor,
    tables: Tensor,
    block_sizes: Sequence[int],
    ids: Tensor,
) -> None:
    """See chained.MoveRows."""
    moved = torch.where(given.num_known >= 0, lengths[given.rows] - given.num_known, 0)
    for numbers in (given.places, given.positions, given.output_positions, given.targets, given.kv_lens):
        numbers.add_(moved)
    given.drafts.copy_(torch.where(given.drafts == UNTOLD, kept_ids[given.places], given.drafts))
    ids.copy_(given.drafts.clamp(min=0))
    places = given.kv_lens.long() - 1
    for table, slots, size in zip(tables, given.cache_slots, block_sizes, strict=True):
        slots.copy_(slots_of(table, places, size, slots >= 0))


def verify_drafts(given: ChainRows, lengths: Tensor, kept_ids: Tensor, max_logits: Tensor) -> Tensor:
    """See chained.VerifyDrafts."""
    firsts, heads, ids = given.firsts, given.heads, given.drafts
    chosen = kept_ids[given.targets]
    number = torch.arange(len(ids), device=ids.device) - firsts
    is_right = torch.where(given.num_taken >= 0, number <= given.num_taken, chosen.roll(1) == ids)
    is_draft, is_right = number > 0, is_right & (ids >= 0) & (max_logits.abs() < torch.inf)
    num_wrong = (is_draft > is_right).cumsum(0)
    is_kept = is_draft & (num_wrong == num_wrong[firsts])
    kept = torch.zeros_like(firsts).index_add_(0, firsts, is_kept.long())[heads]
    lengths[given.rows[heads]] = given.kv_lens[heads] + kept + 1
    return heads + kept


def link_guesses(
    given: ChainRows, lasts: Tensor, tables: Tensor, block_sizes: Sequence[int], count: int, spare_place: int
) -> Ahead:
    """See chained.LinkGuesses."""
    numbers = torch.arange(count, device=lasts.device)[:, None]
    wanted = given.num_wanted[lasts]
    is_live = wanted >= numbers
    places = torch.where(is_live, given.kv_lens[lasts].long() - 1 + numbers, 0)
    found = [
        given.output_positions[lasts] + 1 + numbers,
        torch.where(wanted > numbers, given.targets[lasts] + 1 + numbers, spare_place),
        torch.where(is_live, given.positions[lasts] + numbers, 0),
    ]
    for table, size in zip(tables, block_sizes, strict=True):
        each = table.repeat(count, 1)
        found.append(slots_of(each, places.flatten(), size, is_live.flatten()).view(count, -1))
    return Ahead(torch.stack(found, 1), places.int() + 1)


def look_up(token_ids: Tensor, rows: Tensor, lengths: Tensor, least: int, most: int, count: int) -> Tensor:
    """See chained.LookUp."""
    found = torch.full((len(rows), count), -1)
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        ids, best = token_ids[row, :length], (least - 1, 0)
        for place in range(least, length):
            same = (ids[:place].flip(0)[:most] == ids.flip(0)[: min(place, most)]).long()
            best = max(best, (int(same.cumprod(0).sum()), place))
        if best[0] >= least:
            following = ids[best[1] :]
            found[index] = following[torch.arange(count) % len(following)]
    return found.to(token_ids.device)


CHAIN_KERNELS = ChainKernels(move_rows, verify_drafts, link_guesses, look_up)
