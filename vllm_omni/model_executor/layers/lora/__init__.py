# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for diffusion models: this package loads adapter files, holds weights in fixed-size
slots, and selects the adapters of each forward pass.

`files.py` finds an adapter's files and parses their tensor names. `adapter.py` validates them
against a model and reads the data. `sites.py` adds the low-rank products to the outputs of the
model's layers. `store.py` decides which adapters are in host memory and in device slots. The
configuration, the requests, the reader for PEFT settings and the HTTP routes are vLLM's own
(`vllm.lora`).

vLLM's LoRA layers are not used, because they replace only layers whose type is exactly one of
vLLM's, all-reduce over vLLM's tensor-parallel group (this project uses a `ParallelContext`), and
apply one adapter per token, at strength 1. They also support neither deltas for biases and norms
nor naming styles other than PEFT's. Their advantage is that different tokens of a batch can use
different adapters. This advantage does not matter here, because a forward pass processes thousands
of tokens of one session. Requests that use different adapters run in separate forward passes. Each
adapter costs two extra matrix multiplications in every linear layer that it changes.
"""
