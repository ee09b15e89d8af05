# SPDX-License-Identifier: Apache-2.0
"""Controls of live streams: actions and camera poses over time."""
