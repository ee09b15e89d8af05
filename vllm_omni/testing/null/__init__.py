# SPDX-License-Identifier: Apache-2.0
"""Models that compute next to nothing and go through everything: the smallest whole examples."""
