# SPDX-License-Identifier: Apache-2.0
"""FP8 kernels."""
