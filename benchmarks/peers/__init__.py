# SPDX-License-Identifier: Apache-2.0
"""Times other engines and this project side by side on one GPU: `python -m benchmarks.peers`."""
