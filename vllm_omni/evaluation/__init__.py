# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni evaluate`: videos by the endpoints of a server, and measures of videos.

The measures need no other model and no download.
"""
