# SPDX-License-Identifier: Apache-2.0
"""The endpoint `/v1/realtime/webrtc`, which sends live video over WebRTC. Connections are set up
through WHEP's HTTP exchange.
"""
