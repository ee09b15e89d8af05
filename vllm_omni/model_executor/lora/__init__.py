# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of diffusion models: read from files, kept in slots of fixed size, chosen for each forward.

`files.py` finds an adapter's files and reads their names, `adapter.py` checks them against a model and reads the data,
`sites.py` is the arithmetic beside the model's layers, `store.py` decides which adapters are where. Configuration,
requests, PEFT's settings and the HTTP routes are vLLM's own (`vllm.lora`).

vLLM's LoRA layers are not used. They replace layers of vLLM's exact types, sum over vLLM's tensor-parallel group (ours
is a `ParallelContext`'s), take one adapter of strength 1 for each token, and know neither differences of biases and
norms nor any names but PEFT's. Their gain, other adapters for other tokens of a batch, has no use here: a forward is
thousands of tokens of one session, so requests of different adapters take different forwards, each with two plain
matrix products a layer.
"""
