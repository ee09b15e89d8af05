# SPDX-License-Identifier: Apache-2.0
"""Encoders of live video. Endpoints name a codec; `SessionEncoders` owns the encoders."""
