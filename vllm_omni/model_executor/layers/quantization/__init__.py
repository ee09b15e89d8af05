# SPDX-License-Identifier: Apache-2.0
"""Kernels that quantize to FP8 (e4m3) and dequantize, in Triton and in PyTorch.

The code that decides what is quantized is elsewhere:

- keys and values of a K/V window: `layers/kv_cache/quantized_storage.py`
- queries, keys and values of one attention call: `layers/attention/fp8_attention.py`
- weights and inputs of linear layers: `layers/linear/`
- weights that a checkpoint stores quantized: `model_executor/checkpoint/quantization.py`
"""
