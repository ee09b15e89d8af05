# SPDX-License-Identifier: Apache-2.0
"""Several stock vLLM engines behind one request: stages, bounded queues between them, what happens when one dies.

See docs/architecture/composition.md. Nothing here names a model; a family's folder holds its own composition.
"""
