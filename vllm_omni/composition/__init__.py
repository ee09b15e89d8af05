# SPDX-License-Identifier: Apache-2.0
"""Compositions of several stock vLLM engines that serve one request.

For example, Qwen2.5-Omni speaks with a thinker, a talker and token2wav. The package contains the
engines (`ComposedEngine`), bounded queues between their steps, and the handling of a dead engine.
See docs/architecture/composition.md. This package names no model: the composition of a model
family is in the folder of that family. Pipeline-parallel stages are in `worker/diffusion/roles/`.
"""
