# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the realtime endpoints: one client's WebSocket, its limits and its timing."""
