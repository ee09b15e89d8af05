# SPDX-License-Identifier: Apache-2.0
"""Lance's tasks: generation and understanding, step by step."""
