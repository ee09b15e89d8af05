# SPDX-License-Identifier: Apache-2.0
"""Move sessions between servers by transferring snapshots."""
