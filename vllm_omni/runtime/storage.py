# SPDX-License-Identifier: Apache-2.0
"""Detects a full disk from the different errors of the operating system."""

import errno
from typing import Final

STORAGE_FULL: Final = "storage_full"
"""Error code for clients."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because of a full disk, an exceeded quota or a file size limit."""
    return error.errno in _FULL
