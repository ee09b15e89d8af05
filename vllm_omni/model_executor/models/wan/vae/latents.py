# SPDX-License-Identifier: Apache-2.0
"""Sizes of Wan 2.1's latents: channels, pixels per cell side, and video frames per latent frame
(the first stands for 1)."""

LATENT_CHANNELS = 16
VAE_SPATIAL = 8
VAE_TEMPORAL = 4
