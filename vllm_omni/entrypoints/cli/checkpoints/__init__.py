# SPDX-License-Identifier: Apache-2.0
"""Commands that create, download and verify checkpoints."""
