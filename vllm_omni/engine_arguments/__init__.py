# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM's engine that this package's workers refuse or treat differently.

`table.py` lists them, `check.py` checks the arguments of a start against the list, and
`refusals.py` refuses combinations. docs/reference/engine_arguments.md is generated from the table.
"""
