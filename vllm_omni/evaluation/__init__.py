# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni evaluate`: generates videos through the endpoints of a server, and measures videos.

The metrics need no other model and no download.
"""
