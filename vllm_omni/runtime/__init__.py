# SPDX-License-Identifier: Apache-2.0
"""Process-level code of a server: exit codes, heap memory, log context, traces, disk space."""
