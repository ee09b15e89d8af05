# SPDX-License-Identifier: Apache-2.0
"""Compositions of several stock vLLM engines that together serve a request.

For example, Qwen2.5-Omni generates speech with a thinker, a talker and token2wav. The package
contains the engine wrapper (`ComposedEngine`), bounded queues between the steps of a request, and
the handling of dead engines. See docs/architecture/composition.md. This package does not depend on
any model: the composition for a model family is defined in that family's folder. Pipeline-parallel
stages are implemented in `worker/diffusion/roles/`.
"""
