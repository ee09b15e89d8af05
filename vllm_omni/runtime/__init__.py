# SPDX-License-Identifier: Apache-2.0
"""Processes of a server: exit codes, memory of the heap, log context, traces, disk space."""
