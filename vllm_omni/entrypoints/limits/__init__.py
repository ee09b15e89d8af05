# SPDX-License-Identifier: Apache-2.0
"""Access control and limits: keys, tickets, quotas, frame budgets, timeouts, sizes."""
