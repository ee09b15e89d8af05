# SPDX-License-Identifier: Apache-2.0
"""Encoders of live video. An endpoint names a codec, and `SessionEncoders` owns the encoders."""
