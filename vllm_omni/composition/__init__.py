# SPDX-License-Identifier: Apache-2.0
"""Compositions of several stock vLLM engines that serve a request together.

For example, Qwen2.5-Omni generates speech with a thinker, a talker and token2wav. This package
contains the engine wrapper (`ComposedEngine`), bounded queues between a request's steps, and error
handling for dead engines. See docs/architecture/composition.md. The package does not depend on any
model: each model family defines its composition in its own folder. Pipeline-parallel stages are
implemented in `worker/diffusion/roles/`.
"""
