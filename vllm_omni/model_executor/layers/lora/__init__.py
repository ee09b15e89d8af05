# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for diffusion models: this package loads adapter files, holds weights in fixed-size
slots, and selects the adapters of each forward pass.

`files.py` finds an adapter's files and parses their tensor names. `adapter.py` validates them
against a model and reads the data. `sites.py` adds the low-rank products to the results of the
model's layers. `store.py` decides which adapters are in host memory and in device slots. The
configuration, the requests, the reader of PEFT's settings and the HTTP routes are vLLM's
(`vllm.lora`).

vLLM's LoRA layers are not used, because they only replace layers of vLLM's exact types, all-reduce
over vLLM's tensor-parallel group (this project uses a `ParallelContext`), and apply one adapter of
strength 1 per token. vLLM's layers also support neither deltas of biases and norms nor names other
than PEFT's. The advantage of vLLM's layers is that different tokens of a batch can use different
adapters. This advantage does not matter here, because a forward pass has thousands of tokens of a
single session. Requests with different adapters use separate forward passes, each with two
additional matrix products per layer.
"""
