# SPDX-License-Identifier: Apache-2.0
"""Detects a full disk from the various errors that the operating system reports."""

import errno
from typing import Final

STORAGE_FULL: Final = "storage_full"
"""Error code that clients receive when the disk is full."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: OSError) -> bool:
    """Return whether a write failed because of a full disk, an exceeded quota or a file size
    limit.
    """
    return error.errno in _FULL
