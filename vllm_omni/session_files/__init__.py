# SPDX-License-Identifier: Apache-2.0
"""Sessions as files: their state (`snapshot*`) and their requests (`recording`).

Live sessions are handled elsewhere: their state on a rank in `worker/diffusion/sessions`, and their
state in the API server in `entrypoints/realtime/sessions`.
"""
