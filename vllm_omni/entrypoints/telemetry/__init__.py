# SPDX-License-Identifier: Apache-2.0
"""Metrics, traces, logs and request ids of the API server processes."""
