# SPDX-License-Identifier: Apache-2.0
"""Computations between forward passes: flow-matching timesteps, renormalised guidance and token
sampling.

The functions in this module do not synchronise the host with the device.
"""

# N latent tokens, C channels, V vocabulary

from dataclasses import dataclass

import torch

RENORM_TYPES = ("global", "channel", "none")


def flow_timesteps(num_steps: int, shift: float) -> torch.Tensor:
    """Return the timesteps from 1 to 0, fp32 [num_steps + 1].

    Timestep i is t = s u / (1 + (s - 1) u) for u = 1 - i / num_steps and the shift s.
    """
    u = torch.linspace(1.0, 0.0, num_steps + 1)
    return shift * u / (1 + (shift - 1) * u)


@dataclass(frozen=True)
class ClassifierFreeGuidance:
    """Classifier-free guidance for one generated image or video.

    Guidance applies to steps with low < t <= high if at least one of the scales is greater than 1.
    """

    scale: float
    """Scale of the guidance against the context without the user's text."""
    interval: tuple[float, float]
    """Interval (low, high) of the timesteps with guidance, in [0, 1]."""
    renorm: str
    """Renormalisation mode. Renormalisation limits the guided velocity's norm to the conditional
    velocity's norm. The norm is taken over all tokens and channels (`global`), or over the channels
    of each token (`channel`). `none` disables the renormalisation.
    """
    renorm_min: float
    """Lower bound on the factor by which the renormalisation scales the velocity."""
    image_scale: float = 1.0
    """For edits: scale of the guidance against the context without the image or clip."""

    @property
    def guides_text(self) -> bool:
        return self.scale > 1.0

    @property
    def guides_image(self) -> bool:
        return self.image_scale > 1.0

    @property
    def enabled(self) -> bool:
        return self.guides_text or self.guides_image

    def acts_at(self, t: float) -> bool:
        return self.enabled and self.interval[0] < t <= self.interval[1]

    def combine(
        self,
        cond_NC: torch.Tensor,
        uncond_NC: torch.Tensor | None = None,
        unseen_NC: torch.Tensor | None = None,
        counted: slice = slice(None),
    ) -> torch.Tensor:
        """Return the guided velocity, fp32. The two scales are combined as in BAGEL.

        Args:
            cond_NC: Velocity for the full context.
            uncond_NC: Velocity for the context without the user's text. None disables text
                guidance.
            unseen_NC: Velocity for the context without the image or clip. None disables image
                guidance.
            counted: Tokens included in the `global` norm.
        """
        guided = cond_NC
        if uncond_NC is not None:
            guided = uncond_NC + self.scale * (cond_NC - uncond_NC)
        if unseen_NC is not None:
            guided = unseen_NC + self.image_scale * (guided - unseen_NC)
        if self.renorm == "none":
            return guided
        if self.renorm == "channel":
            want, got = cond_NC.norm(dim=-1, keepdim=True), guided.norm(dim=-1, keepdim=True)
        else:
            want, got = cond_NC[counted].norm(), guided[counted].norm()
        return guided * (want / (got + 1e-8)).clamp(self.renorm_min, 1.0)


@dataclass(frozen=True)
class TokenChoice:
    """Settings of token sampling."""

    temperature: float
    """Sampling temperature. 0 selects the most likely token."""
    top_p: float
    """Each token is sampled from the most likely tokens whose total probability reaches this
    value."""

    def choose(self, logits_V: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Return the id of the next token, int64 [1] on the device. `uniform` is a random number in
        [0, 1) on the device.
        """
        if self.temperature == 0.0:
            return logits_V.argmax(dim=-1, keepdim=True)
        probabilities, ids = torch.softmax(logits_V / self.temperature, dim=-1).sort(
            descending=True
        )
        before = probabilities.cumsum(-1) - probabilities
        # The most likely token is always retained.
        retained = torch.where(before < self.top_p, probabilities, 0.0)
        reached = retained.cumsum(-1)
        index = (reached <= uniform * reached[-1]).sum(dim=0, keepdim=True).clamp(max=len(ids) - 1)
        return ids.gather(0, index)
