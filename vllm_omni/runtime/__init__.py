# SPDX-License-Identifier: Apache-2.0
"""Code that concerns a server's processes: exit codes, heap memory, log context, traces, and full
disks."""
