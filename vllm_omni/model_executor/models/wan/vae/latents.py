# SPDX-License-Identifier: Apache-2.0
"""Geometry of Wan 2.1 latents: number of channels, pixels per latent cell along each side, and
video frames per latent frame (1 for the first latent frame).
"""

LATENT_CHANNELS = 16
VAE_SPATIAL = 8
VAE_TEMPORAL = 4
