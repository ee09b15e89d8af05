# SPDX-License-Identifier: Apache-2.0
"""Tools for testing models: tiny checkpoints (`make-tiny`), comparison with recorded tensors
(`verify`), and models that compute almost nothing (`null`).

Code that serves models does not import this package. When a command needs one of the modules, the
registry imports that module by name.
"""
