# SPDX-License-Identifier: Apache-2.0
"""Who may use the server and how much: keys, tickets, quotas, frame budgets, timeouts, sizes."""
