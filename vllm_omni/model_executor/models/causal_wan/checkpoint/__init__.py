# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of causal Wan models."""
