# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan`: speed and memory of a streaming model on several GPUs, predicted from shapes."""
