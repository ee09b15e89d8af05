# SPDX-License-Identifier: Apache-2.0
"""vLLM engine arguments that this package's workers refuse or treat differently.

`table.py` lists the arguments, `check.py` checks a start command's arguments against the table, and
`refusals.py` refuses invalid combinations of arguments. docs/reference/engine_arguments.md is
generated from the table.
"""
