# SPDX-License-Identifier: Apache-2.0
"""Multiple servers: sessions move between them as snapshots."""
