# SPDX-License-Identifier: Apache-2.0
"""The realtime video endpoint."""
