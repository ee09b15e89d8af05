# SPDX-License-Identifier: Apache-2.0
"""Several servers: sessions move from one to another by their snapshots."""
