# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in real layouts, a module a family: `make_tiny(out, seed, layout)`."""
