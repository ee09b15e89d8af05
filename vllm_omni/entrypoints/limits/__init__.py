# SPDX-License-Identifier: Apache-2.0
"""Access control and limits: API keys, tickets, quotas, frame budgets, timeouts and size limits."""
