# SPDX-License-Identifier: Apache-2.0
"""Attention and rotary embeddings."""
