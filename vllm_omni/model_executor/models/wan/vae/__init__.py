# SPDX-License-Identifier: Apache-2.0
"""The streaming Wan VAE, and the tiny decoder that can replace it."""
