# SPDX-License-Identifier: Apache-2.0
"""The endpoint `/v1/realtime/webrtc`: live video over WebRTC, with WHEP's HTTP exchange."""
