# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of diffusion models: loads files, keeps weights in fixed-size slots, and selects
adapters per forward pass.

`files.py` finds an adapter's files and parses their tensor names. `adapter.py` validates them
against a model and reads the data. `sites.py` adds the low-rank products to the model's layers.
`store.py` manages which adapters are in host memory and in device slots. Configuration, requests,
PEFT's settings and the HTTP routes are those of vLLM (`vllm.lora`).

Why not vLLM's LoRA layers: they replace layers of vLLM's exact types, all-reduce over vLLM's
tensor-parallel group (this project uses a `ParallelContext`), and apply one adapter of strength 1
per token. They also do not support deltas of biases and norms, or names other than PEFT's. Their
advantage, different adapters for different tokens of a batch, does not apply here, because a
forward pass has thousands of tokens of a single session. Requests with different adapters use
separate forward passes, each with two plain matrix products per layer.
"""
