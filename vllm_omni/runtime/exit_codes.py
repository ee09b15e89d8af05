# SPDX-License-Identifier: Apache-2.0
"""Exit codes of this package's processes, as listed in docs/how_to/operations.md."""

from typing import Final

ENGINE_DIED: Final = 70
"""Exit code of the server and its engine processes when the engine has died (EX_SOFTWARE of
sysexits.h).
"""
