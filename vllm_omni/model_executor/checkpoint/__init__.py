# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: files, names of tensors, quantized and merged weights."""
