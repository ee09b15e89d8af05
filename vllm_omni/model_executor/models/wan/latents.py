# SPDX-License-Identifier: Apache-2.0
"""Sizes of Wan 2.1's latents: channels, pixels along a cell's side, video frames of a latent frame (1 of the first)."""

LATENT_CHANNELS = 16
VAE_SPATIAL = 8
VAE_TEMPORAL = 4
