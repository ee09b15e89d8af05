# SPDX-License-Identifier: Apache-2.0
"""Compares Lance's autoencoder with recordings, and the names of its full-size tensors with those
in the released checkpoint.
"""

import json
from dataclasses import replace

import torch

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.lance.network.vae import LanceWanVAE
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_RULES
from vllm_omni.testing.parity.comparison import GoldenScenario, fill_slots, read_tensors
from vllm_omni.testing.parity.lance.recorded import VAE, Fp32Judge

VAE_WEIGHTS = "state_dict_vae.safetensors"


def run_vae(scenario: GoldenScenario) -> None:
    """Compare the encoding and decoding of the recorded clips with the recorded results."""
    weights, _ = read_tensors(scenario.directory / VAE_WEIGHTS)
    vae = LanceWanVAE(
        replace(
            WAN_2_2_VAE,
            base_dim=weights["encoder.conv1.weight"].shape[0],
            decoder_base_dim=weights["decoder.conv1.weight"].shape[0] // 4,
            z_dim=weights["conv2.weight"].shape[0],
            latents_mean=tuple(scenario.get("vae.mean").tolist()),
            latents_std=tuple(scenario.get("vae.std").tolist()),
        )
    )
    slots = checkpoint_slots(vae.vae)
    renamed = {rename(name, VAE_RULES): tensor for name, tensor in weights.items()}
    fill_slots(slots, renamed, VAE_WEIGHTS)
    judge = Fp32Judge(scenario)
    for clip in sorted(
        {name.rpartition(".")[0] for name in scenario.tensors if name.endswith(".x")}
    ):
        mean, log_var = vae.posterior(scenario.get(f"{clip}.x"))
        judge("encode: mean", mean, f"{clip}.mu_norm", VAE)
        judge("encode: log-variance", log_var, f"{clip}.logvar", VAE)
        # The original was recorded before the clamp to [-1, 1] that this package's decoder
        # includes.
        expected = scenario.get(f"{clip}.dec").clamp(-1.0, 1.0)
        scenario.compare("decode", vae.decode_video(scenario.get(f"{clip}.z")), expected, VAE)


def run_report(scenario: GoldenScenario) -> None:
    """Compare the tensor names and shapes of the full-size VAE with those of the released
    checkpoint.
    """
    recorded = json.loads(scenario.path.read_text())
    with torch.device("meta"):
        slots = checkpoint_slots(LanceWanVAE(WAN_2_2_VAE).vae)
    real = {rename(name, VAE_RULES): tuple(shape) for name, shape in recorded["real_keys"].items()}
    wrong = [
        name
        for name in real.keys() | slots.keys()
        if real.get(name) != (slots[name].shape if name in slots else None)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} VAE tensors differ in name or shape: {sorted(wrong)[:3]}")
    scenario.compare(
        "VAE tensors, real size",
        torch.tensor(len(slots)),
        torch.tensor(recorded["real_vae"]["n_tensors"]),
        0.0,
    )
    elements = sum(torch.Size(slot.shape).numel() for slot in slots.values())
    scenario.compare(
        "VAE elements, real size",
        torch.tensor(elements),
        torch.tensor(recorded["real_vae"]["n_params"]),
        0.0,
    )
    for name, value in recorded.items():
        numbers = value.items() if isinstance(value, dict) else [(name, value)]
        for key, number in numbers:
            if "maxabs" in key:
                scenario.compare(
                    "recorded equivalences", torch.tensor(float(number)), torch.tensor(0.0), VAE
                )
