# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of diffusion models: load files, keep weights in fixed-size slots, select adapters
per forward pass.

`files.py` finds an adapter's files and parses their tensor names. `adapter.py` validates them
against a model and reads the data. `sites.py` adds the low-rank products to the model's layers.
`store.py` manages which adapters are in host memory and in device slots. Configuration, requests,
PEFT's settings and the HTTP routes are vLLM's own (`vllm.lora`).

Why not vLLM's LoRA layers: they replace layers of vLLM's exact types, all-reduce over vLLM's
tensor-parallel group (this project uses a `ParallelContext`), and apply one adapter of strength 1
per token. They support neither deltas of biases and norms nor names other than PEFT's. Their
advantage, different adapters for different tokens of a batch, does not apply here: a forward pass
has thousands of tokens of one session. Requests with different adapters use separate forward
passes, each with two plain matrix products per layer.
"""
