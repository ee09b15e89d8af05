# SPDX-License-Identifier: Apache-2.0
"""The endpoint `/v1/realtime/video`."""
