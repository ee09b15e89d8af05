# SPDX-License-Identifier: Apache-2.0
"""A small reverse proxy that keeps sessions on the server that holds them; see `vllm-omni router`."""
