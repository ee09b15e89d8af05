# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices, AdamW for all other parameters, a learning-rate schedule, and averaged
weights.

Muon: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Muon's update is scaled as
in Moonlight, arXiv 2502.16982 (RMS 0.2, as in AdamW). Every weight is reshaped to a matrix
[outputs, everything else], so convolutions are supported too. A step neither synchronises with the
device nor changes a shape, so it can be captured in a CUDA graph.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial that moves singular values from (0, 1] to about 1 (0.7 to
1.2) in five iterations.
"""
_ROUNDS = 5
_EPS = 1e-7
FIRST_AND_LAST = (
    "patch_embedding",
    "text_embedding.0",
    "time_embedding.0",
    "time_projection",
    "head",
    "encoder.conv1",
    "encoder.head",
    "decoder.conv1",
    "decoder.head",
)
"""Names of the first and last layers, which use AdamW even though they are matrices."""


def orthogonalised(update_GMN: torch.Tensor) -> torch.Tensor:
    """Return matrices [G, M, N], M <= N, with their singular values moved to about 1.

    On a GPU, the iterations run in bf16, which is precise enough for five iterations. Elsewhere
    they run in the input's dtype.
    """
    a, b, c = _NEWTON_SCHULZ
    x = update_GMN.bfloat16() if update_GMN.is_cuda else update_GMN
    x = x / (x.norm(dim=(1, 2), keepdim=True) + _EPS)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(update_GMN.dtype)


def parameter_groups(
    module: nn.Module, adam: tuple[str, ...] = FIRST_AND_LAST
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Split the trainable parameters by name into those that use Muon and those that use AdamW.

    AdamW is used for vectors (including vectors stored with more axes, such as norms and
    modulations), for embedding tables, and for the parameters listed in `adam`. Each entry of
    `adam` is a whole parameter name or a prefix that ends before a dot.
    """
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    matrices: dict[str, nn.Parameter] = {}
    others: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        flat = parameter.ndim < 2 or min(_as_matrix(parameter).shape) < 2 or "modulation" in name
        named = any(name == first or name.startswith(first + ".") for first in adam)
        (others if flat or named or id(parameter) in tables else matrices)[name] = parameter
    return matrices, others


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1)


class Muon:
    """Muon: momentum, after which each update is replaced by the nearest orthogonal matrix.
    Matrices of the same shape are processed together.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        update_rms: float = 0.2,
    ) -> None:
        self.parameters = dict(parameters)
        self.lr, self.momentum, self.weight_decay, self.update_rms = (
            lr,
            momentum,
            weight_decay,
            update_rms,
        )
        self.buffers = {
            name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()
        }
        self._groups: dict[tuple[int, int], list[str]] = {}
        for name, parameter in self.parameters.items():
            rows, columns = _as_matrix(parameter).shape
            self._groups.setdefault((min(rows, columns), max(rows, columns)), []).append(name)

    @torch.no_grad()
    def step(self, scale: torch.Tensor) -> None:
        """Apply the parameters' gradients. `scale` multiplies the learning rate and must be on the
        parameters' device.
        """
        if not self.parameters:
            return
        parameters: list[torch.Tensor] = list(self.parameters.values())
        buffers = list(self.buffers.values())
        grads = [_gradient(name, parameter) for name, parameter in self.parameters.items()]
        torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        ahead = dict(
            zip(self.parameters, torch._foreach_lerp(grads, buffers, self.momentum), strict=True)
        )
        if self.weight_decay:
            torch._foreach_mul_(parameters, 1 - scale * (self.lr * self.weight_decay))
        for (_, columns), names in self._groups.items():
            wide = [_wide(_as_matrix(ahead[name])) for name in names]
            step_GMN = orthogonalised(torch.stack(wide)) * (
                scale * (-self.lr * self.update_rms * math.sqrt(columns))
            )
            changes = []
            for name, step_MN in zip(names, step_GMN, strict=True):
                parameter = self.parameters[name]
                upright = step_MN if _is_wide(_as_matrix(parameter)) else step_MN.mT
                changes.append(upright.reshape(parameter.shape))
            torch._foreach_add_([self.parameters[name] for name in names], changes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.buffers)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        _check_names(state, self.buffers, "Muon momenta")
        for name, buffer in self.buffers.items():
            buffer.copy_(state[name])


def _gradient(name: str, parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise ValueError(f"parameter {name} has no gradient: it takes no part in the loss")
    return parameter.grad


def _is_wide(matrix: torch.Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if _is_wide(matrix) else matrix.mT


def _check_names(state: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    wrong = sorted(set(state) ^ set(own))
    if wrong:
        raise ValueError(
            f"{len(wrong)} names of {what} do not belong to this network, e.g. {wrong[:3]}"
        )


class Optimizer:
    """Muon and AdamW for one network, behind one interface. A step's `scale` is the factor of the
    learning-rate schedule, 0 to 1.
    """

    def __init__(
        self,
        muon: Muon,
        adam: torch.optim.AdamW,
        adam_parameters: dict[str, nn.Parameter],
        lr: float,
    ):
        self.muon, self.adam, self.adam_parameters, self.adam_lr = muon, adam, adam_parameters, lr
        some = next(iter((muon.parameters | adam_parameters).values()))
        self.scale = torch.ones((), device=some.device)
        self.parameters = [*muon.parameters.values(), *adam_parameters.values()]

    def step(self, scale: float = 1.0) -> None:
        """Apply the gradients with both optimisers."""
        self.set_scale(scale)
        self.apply()

    def set_scale(self, scale: float) -> None:
        """Set the factor for both learning rates. The factor is set separately from `apply`, so a
        CUDA graph of `apply` does not contain a fixed factor.
        """
        self.scale.fill_(scale)
        for group in self.adam.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(scale * self.adam_lr)
            else:
                group["lr"] = scale * self.adam_lr

    def apply(self) -> None:
        self.muon.step(self.scale)
        if self.adam_parameters:
            self.adam.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            torch._foreach_zero_(
                [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            )

    def clip(self, largest_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `largest_norm`. Return the norm
        before scaling, on the device.
        """
        return torch.nn.utils.clip_grad_norm_(self.parameters, largest_norm)

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs, by parameter name. If `dtype` is given,
        momenta are converted to it to save space.
        """

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True)

        moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        steps = 0.0
        for name, parameter in self.adam_parameters.items():
            state = self.adam.state.get(parameter)
            if state:
                moments[name] = (kept(state["exp_avg"]), kept(state["exp_avg_sq"]))
                steps = float(state["step"])
        muon = {name: kept(buffer) for name, buffer in self.muon.state_dict().items()}
        return {"muon": muon, "adam": moments, "adam_steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        if not state["adam"]:
            self.adam.state.clear()
            return
        _check_names(state["adam"], self.adam_parameters, "AdamW moments")
        on_device = any(
            group.get("fused") or group.get("capturable") for group in self.adam.param_groups
        )
        for name, parameter in self.adam_parameters.items():
            average, square = state["adam"][name]
            steps = torch.tensor(state["adam_steps"], dtype=torch.float32)
            self.adam.state[parameter] = {
                "step": steps.to(parameter.device) if on_device else steps,
                "exp_avg": average.to(parameter, copy=True),
                "exp_avg_sq": square.to(parameter, copy=True),
            }


def build_optimizer(
    module: nn.Module,
    muon_lr: float,
    adam_lr: float,
    *,
    adam: tuple[str, ...] = FIRST_AND_LAST,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    update_rms: float = 0.2,
) -> Optimizer:
    """Build the optimiser for `module`, whose parameters must already be on their final device.

    `weight_decay` is decoupled and applies only to Muon's matrices. `adam` is the argument of
    `parameter_groups`.
    """
    matrices, others = parameter_groups(module, adam)
    if not matrices and not others:
        raise ValueError("no parameter needs a gradient")
    muon = Muon(
        matrices, muon_lr, momentum=momentum, weight_decay=weight_decay, update_rms=update_rms
    )
    cuda = bool(others) and next(iter(others.values())).is_cuda
    first_lr = torch.tensor(adam_lr, device=next(iter(others.values())).device) if cuda else adam_lr
    of_adam = list(others.values()) or [nn.Parameter(torch.zeros(1))]
    optimiser = torch.optim.AdamW(
        of_adam, lr=first_lr, betas=betas, weight_decay=0.0, fused=cuda, capturable=cuda
    )
    return Optimizer(muon, optimiser, others, adam_lr)


def learning_rate(
    fraction: float,
    *,
    warmup: float = 0.01,
    decay_from: float = 0.4,
    last: float = 0.0,
    shape: Literal["linear", "cosine"] = "linear",
) -> float:
    """Return the learning-rate factor at `fraction` of the total training time. The factor rises
    during `warmup`, is then constant, and decreases from `decay_from` on.
    """
    fraction = min(max(fraction, 0.0), 1.0)
    if fraction < warmup:
        return max(fraction / warmup, 1e-3)
    if fraction <= decay_from:
        return 1.0
    done = (fraction - decay_from) / (1 - decay_from)
    left = 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return last + (1 - last) * left


class Ema:
    """Exponential moving average of a module's parameters, stored in fp32.

    The decay at update n is at most (1 + n) / (10 + n), so the random initial weights do not
    dominate a new average. Buffers are not averaged.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay, self.num_updates = module, decay, 0
        self.means = {
            name: parameter.detach().float().clone()
            for name, parameter in module.named_parameters()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the module's current parameters."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        present = [parameter.detach().float() for parameter in self.module.parameters()]
        torch._foreach_lerp_(list(self.means.values()), present, 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Overwrite the parameters of `module`, which must have the same names, with the
        averages.
        """
        for name, parameter in module.named_parameters():
            parameter.copy_(self.means[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context manager that replaces the module's parameters with the averages."""
        own = [parameter.detach().clone() for parameter in self.module.parameters()]
        self.copy_to(self.module)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self.module.parameters(), own, strict=True):
                    parameter.copy_(before)

    def averaged_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state dict with averaged parameters, in fp32."""
        state = {name: value.detach() for name, value in self.module.state_dict().items()}
        return state | {name: mean.clone() for name, mean in self.means.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means), "num_updates": self.num_updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_names(state["means"], self.means, "averaged parameters")
        for name, mean in self.means.items():
            mean.copy_(state["means"][name])
        self.num_updates = int(state["num_updates"])
