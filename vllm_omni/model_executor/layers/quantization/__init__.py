# SPDX-License-Identifier: Apache-2.0
"""Triton and PyTorch kernels that quantize to FP8 (e4m3) and dequantize from FP8 and int8.

The code that decides what to quantize is outside this folder:

- keys and values in a K/V window, and their scales: `layers/kv_cache/quantized_storage.py`. A
  chunk's keys and values are written to the window in one of four ways:
    - `KVWindow.write` handles the general case
    - `models/wan/transformer/fused_ops.py` (`store_keys_values`): Wan's blocks quantize keys and
      values while normalising and rotating the keys; on CUDA, one kernel in `fused_kernels.py` does
      all of this
    - `layers/collectives/head_exchange.py`: under sequence parallelism, keys and values are
      quantized before the all-to-all, and `KVWindow.write_quantized` copies them into the window
    - `models/waypoint/state.py`: Waypoint writes the result of `KVFormat.encode` by token index
- keys that are rotated again after they were written: `SinkWindow._rotate_sinks` and
  `PinnedWindow.place_pinned` quantize them with `KVFormat.quantized`
- queries of an attention call whose keys and values are already FP8:
  `layers/attention/fp8_attention.py`, or `head_exchange.py` under sequence parallelism
- weights and inputs of linear layers: `layers/linear/`
- weights stored quantized in a checkpoint: `model_executor/checkpoint/quantization.py`
"""
