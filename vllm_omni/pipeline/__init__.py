# SPDX-License-Identifier: Apache-2.0
"""Compositions of several stock vLLM engines that serve one request.

The package contains stages, bounded queues between them, and the handling of a dead engine. See
docs/architecture/composition.md. It names no model; the composition of a family is in its folder.
"""
