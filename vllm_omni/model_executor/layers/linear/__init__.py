# SPDX-License-Identifier: Apache-2.0
"""Linear layers and their precisions."""
