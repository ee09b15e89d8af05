# SPDX-License-Identifier: Apache-2.0
"""Models for trying things out: `make-tiny` (tiny), `verify` (parity), and models that compute
nothing (null).

No file that serves a model imports these; the registry names them as text, and imports them when
they are asked for.
"""
