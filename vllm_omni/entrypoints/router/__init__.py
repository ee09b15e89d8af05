# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy that keeps each session on the server that holds it. See `vllm-omni router`."""
