# SPDX-License-Identifier: Apache-2.0
"""Tools to test models: tiny checkpoints (`make-tiny`), comparison with recordings (`verify`), and
models that compute almost nothing (`null`).

Code that serves models does not import this package. The registry imports a module of it by name,
when a command needs it.
"""
