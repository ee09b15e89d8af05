# SPDX-License-Identifier: Apache-2.0
"""The generate endpoint."""
