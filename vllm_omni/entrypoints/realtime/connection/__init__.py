# SPDX-License-Identifier: Apache-2.0
"""What the realtime endpoints share: one client's WebSocket, its limits and its timing."""
