# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding of video files."""

from vllm_omni.entrypoints.media.mp4 import encode_mp4

__all__ = ["encode_mp4"]
