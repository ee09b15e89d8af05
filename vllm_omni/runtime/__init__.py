# SPDX-License-Identifier: Apache-2.0
"""Helpers for the processes of a server: exit codes, heap memory, log context, trace context, and
detection of full disks.
"""
