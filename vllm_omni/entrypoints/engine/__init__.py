# SPDX-License-Identifier: Apache-2.0
"""Access to vLLM's engine: requests, data-parallel ranks, readiness, failure detection and
draining.
"""
