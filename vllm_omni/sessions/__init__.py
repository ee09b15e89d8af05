# SPDX-License-Identifier: Apache-2.0
"""Sessions outside their engine: as a file (`snapshot*`), and as their requests (`recording`)."""
