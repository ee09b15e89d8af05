# SPDX-License-Identifier: Apache-2.0
"""Video jobs: their routes, execution and storage."""
