# SPDX-License-Identifier: Apache-2.0
"""Sizes of Wan 2.1's latents: the number of channels, pixels per cell along each side, and video
frames per latent frame (1 for the first latent frame).
"""

LATENT_CHANNELS = 16
VAE_SPATIAL = 8
VAE_TEMPORAL = 4
