# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni evaluate`: generates videos through a server's endpoints, and measures videos.

The metrics require neither an additional model nor a download.
"""
