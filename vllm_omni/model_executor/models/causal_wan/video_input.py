# SPDX-License-Identifier: Apache-2.0
"""`VideoEncoder`: converts input frames to latents. A stream's start image becomes clean latents,
and an input video becomes noisy latents.

A video is received chunk by chunk, and each chunk starts from the noisy latents of its frames.

The VAE encoder's cache is carried from chunk to chunk. The noise controller (`motion.py`)
determines the amount of noise and the timestep of the first denoise step. All state is in the
immutable `VideoInput`, which callers pass in and receive back. Tested by
tests/model_executor/models/causal_wan/test_causal_wan_video.py.
"""

import torch

from vllm_omni.model_executor.models.causal_wan.config import VIDEO_NOISE_SCALE, CausalWanOptions
from vllm_omni.model_executor.models.causal_wan.motion import (
    first_timestep,
    motion,
    next_noise_scale,
)
from vllm_omni.model_executor.models.causal_wan.state import VideoInput
from vllm_omni.model_executor.models.wan.images.files import prepare_image
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache
from vllm_omni.model_executor.schedules import FewStepSchedule


class VideoEncoder:
    """Encodes the input videos and start images of streams.

    `vae` must have an encoder. `options` contains the schedule and the normalisation for
    video-to-video streams.
    """

    def __init__(self, vae: StreamingWanVAE, options: CausalWanOptions) -> None:
        self._vae = vae
        self._options = options

    def state_nbytes(self, height: int, width: int) -> int:
        """Return the size in bytes of the `VideoInput` for a stream of `height` x `width`
        pixels.
        """
        return self._vae.encoder_cache_nbytes(height, width) + 3 * height * width

    def noisy_latents(
        self, frames_THWC: torch.Tensor, before: VideoInput | None, noise: torch.Tensor
    ) -> tuple[torch.Tensor, FewStepSchedule, VideoInput]:
        """Return (latents fp32 [16, F, h, w], the chunk's schedule, the stream's next state).

        `frames_THWC` is uint8 on any device. T is 1 + 4 (F - 1) at the start of a stream (`before`
        is None), otherwise 4 F. `noise` has the same shape as the latents. The call synchronises
        the host with the device once, to read the amount of motion in the frames.
        """
        frames_THWC = frames_THWC.to(noise.device)
        initial = VIDEO_NOISE_SCALE
        if before is None:
            scale = initial
        else:
            scale = next_noise_scale(
                initial, before.noise_scale, motion(frames_THWC, before.last_frame)
            )
        pixels_1CTHW = (frames_THWC.permute(3, 0, 1, 2).unsqueeze(0).float() / 127.5) - 1.0
        encoded, cache = self._encode(pixels_1CTHW, None if before is None else before.encoder)
        latents = scale * noise + (1 - scale) * encoded
        schedule = self._options.video_schedule(float(first_timestep(scale)))
        return latents, schedule, VideoInput(cache, frames_THWC[-1].clone(), scale)

    def image(
        self, image_HWC: torch.Tensor, height: int, width: int, device: torch.device
    ) -> torch.Tensor:
        """Return the latent frame [16, 1, h, w] for a start image, which is uint8 and is stretched
        to `height` x `width`.
        """
        return self._encode(prepare_image(image_HWC.to(device), height, width), None)[0]

    def _encode(
        self, pixels_1CTHW: torch.Tensor, before: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Return (latents fp32 [16, F, h, w] as the checkpoint expects them, the encoder's next
        cache).
        """
        encoded, cache = self._vae.encode(pixels_1CTHW, before)
        if not self._options.normalize_video_latent:
            encoded = encoded * self._vae.latents_std + self._vae.latents_mean
        return encoded[0], cache
