# SPDX-License-Identifier: Apache-2.0
"""Serve worlds as reinforcement-learning environments over HTTP (`/v1/environments`)."""
