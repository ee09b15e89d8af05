# SPDX-License-Identifier: Apache-2.0
"""Move sessions between servers, in the form of snapshots."""
