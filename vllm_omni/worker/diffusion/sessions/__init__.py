# SPDX-License-Identifier: Apache-2.0
"""Sessions of one rank: store, admission, chunks in flight, snapshots."""
