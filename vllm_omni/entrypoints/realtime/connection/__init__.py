# SPDX-License-Identifier: Apache-2.0
"""Code that the realtime endpoints share: a client's WebSocket, its limits and its timing."""
