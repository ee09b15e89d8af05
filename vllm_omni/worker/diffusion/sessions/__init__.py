# SPDX-License-Identifier: Apache-2.0
"""Sessions on one rank: session store, admission, chunks in flight, and snapshots."""
