# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: reading and writing at offsets, digests, and saved session state."""
