# SPDX-License-Identifier: Apache-2.0
"""Encoders for live video. An endpoint names a codec, and `SessionEncoders` owns the encoders."""
