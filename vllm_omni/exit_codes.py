# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of this package's processes, as docs/how_to/operations.md lists them."""

from typing import Final

ENGINE_DIED: Final = 70
"""Of a server whose engine died, and of an engine's process that ends itself (EX_SOFTWARE of sysexits.h)."""
