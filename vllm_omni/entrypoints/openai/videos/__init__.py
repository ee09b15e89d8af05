# SPDX-License-Identifier: Apache-2.0
"""Video jobs: routes, execution, storage."""
