# SPDX-License-Identifier: Apache-2.0
"""A session outside its engine: as a file (`snapshot*`), and as the requests that made it (`recording`)."""
