# SPDX-License-Identifier: Apache-2.0
"""Lance's networks."""
