# SPDX-License-Identifier: Apache-2.0
"""Video and audio containers."""

from vllm_omni.entrypoints.media.mp4 import encode_mp4

__all__ = ["encode_mp4"]
