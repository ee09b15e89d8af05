# SPDX-License-Identifier: Apache-2.0
"""Sessions' K/V caches: windows, formats and pooled memory."""
