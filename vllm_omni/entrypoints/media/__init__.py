# SPDX-License-Identifier: Apache-2.0
"""Video and audio containers."""
