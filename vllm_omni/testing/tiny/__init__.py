# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights in the released layouts, one module per family.

Each family's module defines the function `make_tiny(out, seed, layout)`.
"""
