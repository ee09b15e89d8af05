# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints: files, tensor names, quantized and merged weights."""
