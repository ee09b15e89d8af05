# SPDX-License-Identifier: Apache-2.0
"""The `/v1/realtime/webrtc` endpoint, which sends live video over WebRTC. Connections are set up
through WHEP's HTTP exchange.
"""
