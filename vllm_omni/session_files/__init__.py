# SPDX-License-Identifier: Apache-2.0
"""Sessions as files: their state (`snapshot*`) and their requests (`recording`).

Live sessions are managed elsewhere: by `worker/diffusion/sessions` on each rank, and by
`entrypoints/realtime/sessions` in the API server.
"""
