# SPDX-License-Identifier: Apache-2.0
"""Code that the realtime endpoints share: the WebSocket of a client, its limits and its timing."""
