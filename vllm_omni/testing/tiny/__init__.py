# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights in the released layouts, one module per family.

Every module of this package has a function `make_tiny(out, seed, layout)`.
"""
