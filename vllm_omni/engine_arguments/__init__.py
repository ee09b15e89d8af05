# SPDX-License-Identifier: Apache-2.0
"""Every argument of vLLM's engine, and each of our workers' verdict on it: honoured, meaningless or refused.

`table.py` is the data; docs/user_guide/engine_arguments.md is generated from it.
`check.py` compares a start with it.
"""
