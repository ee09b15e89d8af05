# SPDX-License-Identifier: Apache-2.0
"""Kernels that quantize to FP8 (e4m3) and dequantize from it, in Triton and in PyTorch.

The code that decides what is quantized is outside this folder:

- keys and values of a K/V window, and their scales: `layers/kv_cache/quantized_storage.py`. Keys
  and values are written to the window in one of four ways:
    - `KVWindow.write` handles the general case
    - `models/wan/transformer/fused_ops.py` (`store_keys_values`): Wan's blocks quantize keys and
      values while normalising and rotating the keys; on CUDA, a kernel of `fused_kernels.py` does
      all of this
    - `layers/collectives/head_exchange.py`: under sequence parallelism, keys and values are
      quantized before the all-to-all, and `KVWindow.write_quantized` copies them into the window
    - `models/waypoint/state.py`: Waypoint writes the result of `KVFormat.encode` by token index
- queries of an attention call with keys and values that are already FP8:
  `layers/attention/fp8_attention.py`; under sequence parallelism `head_exchange.py`
- weights and inputs of linear layers: `layers/linear/`
- weights that a checkpoint stores quantized: `model_executor/checkpoint/quantization.py`
"""
