# SPDX-License-Identifier: Apache-2.0
"""Exit codes of this package's processes, as listed in docs/how_to/operations.md."""

from typing import Final

ENGINE_DIED: Final = 70
"""The engine died: exit code of its server and of engine processes (EX_SOFTWARE of sysexits.h)."""
