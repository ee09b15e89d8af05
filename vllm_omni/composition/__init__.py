# SPDX-License-Identifier: Apache-2.0
"""Compositions of several stock vLLM engines that serve one request.

For example, Qwen2.5-Omni generates speech with a thinker, a talker and token2wav. The package
contains the engines (`ComposedEngine`), bounded queues between their steps, and the handling of a
dead engine. See docs/architecture/composition.md. This package does not depend on a model: the
composition of a model family is in that family's folder. Pipeline-parallel stages are in
`worker/diffusion/roles/`.
"""
