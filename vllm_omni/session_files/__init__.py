# SPDX-License-Identifier: Apache-2.0
"""Sessions as files: their state (`snapshot*`) and their requests (`recording`).

Live sessions are not handled here: `worker/diffusion/sessions` contains their state on a rank, and
`entrypoints/realtime/sessions` contains their state in the API server.
"""
