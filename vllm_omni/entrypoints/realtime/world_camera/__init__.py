# SPDX-License-Identifier: Apache-2.0
"""The world camera endpoint."""
