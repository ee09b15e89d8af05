# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensor-, sequence- and pipeline-parallel ranks."""
