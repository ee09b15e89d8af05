# SPDX-License-Identifier: Apache-2.0
"""Time other engines and this one side by side on one GPU: `python -m benchmarks.peers`."""
