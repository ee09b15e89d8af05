# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the realtime endpoints: a client's WebSocket, its limits and its timing."""
