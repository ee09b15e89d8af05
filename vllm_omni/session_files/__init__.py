# SPDX-License-Identifier: Apache-2.0
"""Sessions as files: their state (`snapshot*`) and their requests (`recording`).

Live sessions are elsewhere: their state on a rank is in `worker/diffusion/sessions`, and their
state in the API server is in `entrypoints/realtime/sessions`.
"""
