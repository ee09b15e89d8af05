# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni evaluate`: generates videos through the endpoints of a server, and measures videos.

The metrics require no additional model and no download.
"""
