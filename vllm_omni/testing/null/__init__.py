# SPDX-License-Identifier: Apache-2.0
"""Models that compute almost nothing, for tests and as minimal complete examples."""
