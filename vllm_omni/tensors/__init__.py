# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: positioned reads and writes, and state that is saved and restored."""
