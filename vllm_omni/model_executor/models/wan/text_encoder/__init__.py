# SPDX-License-Identifier: Apache-2.0
"""Wan's UMT5 text encoder."""
