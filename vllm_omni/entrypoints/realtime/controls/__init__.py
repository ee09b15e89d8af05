# SPDX-License-Identifier: Apache-2.0
"""Actions and camera poses over time."""
