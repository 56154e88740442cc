"""`open_host_memory` lets ranks on CPUs of one host map the same memory. Only `connect_peers` calls it."""

import mmap
import os
import secrets
from pathlib import Path

import torch
from torch import distributed

from octavo.base.log import get_logger
from octavo.runtime.distributed.group import Group
from octavo.runtime.kernels.peers import PeerMemory

logger = get_logger(__name__)

_HEAD_BYTES, _BYTES = 4 << 10, 132 << 10
"""Of each rank: flag, mark and turn; and with them both pieces of a message (kernels/cpu/ranks.cpp)."""
_MARK_AT, _TURN_AT = 64, 128
_ANY_LENGTH = 1 << 62


def open_host_memory(group: Group) -> PeerMemory | None:
    """Map memory without a name, which the first rank makes; return None where a rank cannot."""
    mark, made = secrets.token_bytes(16), -1
    if group.is_first and hasattr(os, "memfd_create"):
        made = os.memfd_create("octavo-ranks")
        os.truncate(made, group.size * _BYTES)
        os.pwrite(made, mark, _MARK_AT)
    told = [(os.getpid(), made, mark)] * group.size
    distributed.all_gather_object(told, told[0], group=group.process_group)
    memory = _map(*told[0], group.size * _BYTES)
    can_all = group.least(int(memory is not None), torch.device("cpu"))
    if made >= 0:
        os.close(made)
    if memory is None or not can_all:
        return None
    turn = torch.frombuffer(memory, dtype=torch.int32, count=1, offset=group.rank * _BYTES + _TURN_AT)
    first = turn.data_ptr() - group.rank * _BYTES - _TURN_AT
    flags = torch.arange(group.size) * _BYTES + first
    return PeerMemory(group.rank, group.size, flags + _HEAD_BYTES, flags, turn, _ANY_LENGTH)


def _map(pid: int, file: int, mark: bytes, size: int) -> mmap.mmap | None:
    """Open another rank's file; the mark tells it from one of another host's."""
    try:
        with Path(f"/proc/{pid}/fd/{file}").open("r+b") as shared:
            shared.seek(_MARK_AT)
            return mmap.mmap(shared.fileno(), size) if shared.read(len(mark)) == mark else None
    except OSError as error:
        logger.info("Memory of the other ranks: %s", error)
        return None
