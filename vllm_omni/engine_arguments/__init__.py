# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM's engine that this package's workers refuse, or that have another effect here.

`table.py` is the data; docs/reference/engine_arguments.md is generated from it.
`check.py` compares a start with it.
"""
