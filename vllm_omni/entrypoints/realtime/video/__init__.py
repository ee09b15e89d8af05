# SPDX-License-Identifier: Apache-2.0
"""The `/v1/realtime/video` endpoint."""
