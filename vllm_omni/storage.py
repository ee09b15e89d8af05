# SPDX-License-Identifier: Apache-2.0
"""A disk without room, by whichever name the system gives it.

Held by tests/entrypoints/realtime/test_death_served.py.
"""

import errno
from typing import Final

STORAGE_FULL: Final = "storage_full"
"""The code that clients get."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because of a full disk, a used-up quota or a limit on the size of files."""
    return error.errno in _FULL
