"""Whose a file or folder is, and who else can have changed it: asked before its content is believed."""

import os
from stat import S_IRWXG, S_IRWXO, S_IWGRP, S_IWOTH


def is_private(state: os.stat_result) -> bool:
    """Return True for what is this user's and closed to all others."""
    return state.st_uid == os.geteuid() and not state.st_mode & (S_IRWXG | S_IRWXO)


def is_trusted(state: os.stat_result) -> bool:
    """Return True for what nobody but this user and root can have written."""
    return state.st_uid in (os.geteuid(), 0) and not state.st_mode & (S_IWGRP | S_IWOTH)
