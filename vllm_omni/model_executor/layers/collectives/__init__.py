# SPDX-License-Identifier: Apache-2.0
"""Collectives for tensor-, sequence- and pipeline-parallel ranks."""
