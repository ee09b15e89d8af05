# SPDX-License-Identifier: Apache-2.0
"""Several stock vLLM engines behind one request: stages, bounded queues between them, handling of a dead engine.

See docs/architecture/composition.md. Nothing here names a model; a family's folder holds its own composition.
"""
