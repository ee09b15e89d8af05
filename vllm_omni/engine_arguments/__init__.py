# SPDX-License-Identifier: Apache-2.0
"""Every argument of vLLM's engine, and what each of our workers does with it: honour it, have no use for it, refuse it.

`table.py` is the data; docs/user_guide/engine_arguments.md is generated from it.
`check.py` compares a start with it.
"""
