# SPDX-License-Identifier: Apache-2.0
"""Worlds as environments over HTTP (`/v1/environments`)."""
