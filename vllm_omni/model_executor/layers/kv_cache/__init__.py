# SPDX-License-Identifier: Apache-2.0
"""K/V caches of sessions: windows, formats, pooled memory."""
