# SPDX-License-Identifier: Apache-2.0
"""Commands that make, fetch and verify checkpoints."""
