# SPDX-License-Identifier: Apache-2.0
"""Candidates of `vae_kernels.py`: Triton kernels and two ways through a Wan 2.1 decoder with random weights.

Needs torch and triton only. The fused way: one Triton pass adds bias and residual, normalises, applies SiLU and writes
each frame beside its two predecessors; a causal convolution is then one 2-D convolution, and nearest upsampling with
its 3x3 convolution one of 2x2 before the pixels are spread (weights that meet the same cell are summed).
"""

# T frames, H rows, W columns, P = H W, C channels, OUT channels of a result; activations are [T, H, W, C] in memory

import torch
import triton
import triton.language as tl
from torch.nn import functional


@triton.jit
def _stack_kernel(
    x_ptr, bias_ptr, residual_ptr, gamma_ptr, past_ptr, out_ptr, sum_ptr, keep_ptr,
    T, P, width, scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, SLOTS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SUM: tl.constexpr, NORM: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    frame = tl.program_id(1).to(tl.int64)  # of past and new ones together
    channel = tl.arange(0, BLOCK_C)
    mask = (pixel < P)[:, None] & (channel < C)[None, :]
    at = pixel[:, None] * C + channel[None, :]
    if frame < 2:
        y = tl.load(past_ptr + frame * P * C + at, mask=mask, other=0.0).to(tl.float32)
    else:
        t = frame - 2
        if SHUFFLED:
            row, column = pixel // width, pixel % width
            height = P // width
            cell = (t * (height // 2 + 1) + row // 2 + row % 2) * (width // 2 + 1) + column // 2 + column % 2
            source = (cell * 4 + (row % 2) * 2 + column % 2)[:, None] * C + channel[None, :]
            y = tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)
        else:
            y = tl.load(x_ptr + t * P * C + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + t * P * C + at, mask=mask, other=0.0).to(tl.float32)
        if SUM:
            tl.store(sum_ptr + t * P * C + at, y.to(sum_ptr.dtype.element_ty), mask=mask)
        if NORM:
            norm = tl.sqrt(tl.sum(y * y, axis=1))
            gamma = tl.load(gamma_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
            y = y * (scale / tl.maximum(norm, 1e-12))[:, None] * gamma[None, :]
            y = y * tl.sigmoid(y)
    y = y.to(out_ptr.dtype.element_ty)
    if SLOTS == 3:
        wide = pixel[:, None] * (3 * C) + channel[None, :]
        for tap in tl.static_range(3):
            if (frame >= tap) & (frame - tap < T):
                tl.store(out_ptr + (frame - tap) * P * (3 * C) + tap * C + wide, y, mask=mask)
    else:
        tl.store(out_ptr + frame * P * C + at, y, mask=mask)
    if frame >= T:
        tl.store(keep_ptr + (frame - T) * P * C + at, y, mask=mask)


def stack(
    x, past, *, bias=None, residual=None, gamma=None, want_sum=False, shuffled=False, slots=3, block=4096, warps=8
):
    """SiLU(RMS norm(x + bias + residual)) behind `past`; every frame beside its two predecessors.

    x: [T, H, W, C], or, shuffled, [T, H/2+1, W/2+1, 4C]. past: [2, H, W, C]. Returns out [T, H, W, 3C] (slots=3) or
    [T+2, H, W, C] (slots=1), the last two frames [2, H, W, C], and the sum [T, H, W, C] or None.
    """
    _, height, width, channels = past.shape
    frames = x.shape[0]
    assert x.is_contiguous() and past.is_contiguous() and (residual is None or residual.is_contiguous())
    out_shape = (frames, height, width, 3 * channels) if slots == 3 else (frames + 2, height, width, channels)
    out = x.new_empty(out_shape)
    keep = torch.empty_like(past)
    total = x.new_empty(frames, height, width, channels) if want_sum else None
    pixels = height * width
    block_c = triton.next_power_of_2(channels)
    block_p = max(1, min(block // block_c, triton.next_power_of_2(pixels)))
    _stack_kernel[(triton.cdiv(pixels, block_p), frames + 2)](
        x, bias, residual, gamma, past, out, total, keep, frames, pixels, width, channels**0.5,
        C=channels, BLOCK_C=block_c, BLOCK_P=block_p, SLOTS=slots, BIAS=bias is not None,
        RESIDUAL=residual is not None, SUM=want_sum, NORM=gamma is not None, SHUFFLED=shuffled, num_warps=warps,
    )  # fmt: skip
    return out, keep, total


@triton.jit
def _conv_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, T, H, W, OUT,
    C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Implicit GEMM: x [T+2, H, W, C], w [27 C, O] -> out [T, H, W, O]; tiles of BH x BW pixels of one frame."""
    across = tl.cdiv(W, BW)
    down = tl.cdiv(H, BH)
    pid = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    t = pid // (across * down)
    tile = pid % (across * down)
    local = tl.arange(0, BH * BW)
    row = (tile // across) * BH + local // BW
    column = (tile % across) * BW + local % BW
    k = tl.arange(0, BK)
    acc = tl.zeros((BH * BW, BN), dtype=tl.float32)
    for step in range(27 * (C // BK)):
        tap = step // (C // BK)
        c = (step % (C // BK)) * BK
        r = row + (tap // 3) % 3 - 1
        q = column + tap % 3 - 1
        seen = (r >= 0) & (r < H) & (q >= 0) & (q < W)
        base = (((t + tap // 9) * H + r).to(tl.int64) * W + q) * C + c
        a = tl.load(x_ptr + base[:, None] + k[None, :], mask=seen[:, None], other=0.0)
        b = tl.load(w_ptr + (tap * C + c + k)[:, None] * OUT + n[None, :], mask=(n < OUT)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    acc += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    inside = ((row < H) & (column < W))[:, None] & (n < OUT)[None, :]
    at = ((t * H + row).to(tl.int64) * W + column)[:, None] * OUT + n[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def conv_pointers(x, w_KO, bias, config, residual=None):
    bh, bw, bn, bk, warps, stages = config
    frames, height, width, channels = x.shape
    out = x.new_empty(frames - 2, height, width, w_KO.shape[1])
    grid = ((frames - 2) * triton.cdiv(height, bh) * triton.cdiv(width, bw), triton.cdiv(w_KO.shape[1], bn))
    _conv_kernel[grid](
        x, w_KO, bias, residual, out, frames - 2, height, width, w_KO.shape[1],
        C=channels, BH=bh, BW=bw, BN=bn, BK=bk, RESIDUAL=residual is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _conv_tma_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, T, H, W, OUT,
    C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As above; the copy engine fetches each shifted box of pixels and fills what lies outside with zeros."""
    across = tl.cdiv(W, BW)
    down = tl.cdiv(H, BH)
    pid = tl.program_id(0)
    n0 = tl.program_id(1) * BN
    t = pid // (across * down)
    tile = pid % (across * down)
    row0 = (tile // across) * BH
    column0 = (tile % across) * BW
    acc = tl.zeros((BH * BW, BN), dtype=tl.float32)
    for step in range(27 * (C // BK)):
        tap = step // (C // BK)
        c = (step % (C // BK)) * BK
        a = x_desc.load([t + tap // 9, row0 + (tap // 3) % 3 - 1, column0 + tap % 3 - 1, c])
        b = w_desc.load([tap * C + c, n0])
        acc = tl.dot(a.reshape(BH * BW, BK), b, acc)
    n = n0 + tl.arange(0, BN)
    local = tl.arange(0, BH * BW)
    row, column = row0 + local // BW, column0 + local % BW
    acc += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    inside = ((row < H) & (column < W))[:, None] & (n < OUT)[None, :]
    at = ((t * H + row).to(tl.int64) * W + column)[:, None] * OUT + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def conv_tma(x, w_KO, bias, config):
    from triton.tools.tensor_descriptor import TensorDescriptor

    bh, bw, bn, bk, warps, stages = config
    frames, height, width, channels = x.shape
    out = x.new_empty(frames - 2, height, width, w_KO.shape[1])
    grid = ((frames - 2) * triton.cdiv(height, bh) * triton.cdiv(width, bw), triton.cdiv(w_KO.shape[1], bn))
    _conv_tma_kernel[grid](
        TensorDescriptor.from_tensor(x, [1, bh, bw, bk]), TensorDescriptor.from_tensor(w_KO, [bk, bn]), bias, out,
        frames - 2, height, width, w_KO.shape[1], C=channels, BH=bh, BW=bw, BN=bn, BK=bk,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# The plain decoder, in few lines ------------------------------------------------------------------------------------


def rms_silu(x, gamma):
    """x: [1, C, T, H, W]."""
    return functional.silu(
        functional.normalize(x.float(), dim=1).to(x.dtype) * x.shape[1] ** 0.5 * gamma.view(1, -1, 1, 1, 1)
    )


def causal(x, past, w, b):
    x = torch.cat((past, x), dim=2)
    side = w.shape[-1] // 2
    return functional.conv3d(functional.pad(x, (side, side, side, side, 0, 0)), w, b), x[:, :, -2:].clone()


class Decoder:
    """Weights of a Wan 2.1 decoder (random) and its two ways through a latent frame that is not the first."""

    def __init__(self, dim: int, height: int, width: int, dtype: torch.dtype, device: str, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        d = [4 * dim, 4 * dim, 4 * dim, 2 * dim, dim]
        self.weights: dict[str, torch.Tensor] = {}
        self.past_shapes: dict[str, tuple[int, ...]] = {}
        self._conv("in", 16, d[0], (3, 3, 3), height, width)
        self.plan: list[tuple] = []
        self._res("mid0", d[0], d[0], height, width)
        self.plan.append(("attention", "attn"))
        self._param("attn.gamma", (d[0],), 1)
        self._param("attn.qkv.w", (3 * d[0], d[0], 1, 1), d[0])
        self._param("attn.proj.w", (d[0], d[0], 1, 1), d[0])
        self._res("mid1", d[0], d[0], height, width)
        for level, (cin, cout) in enumerate(zip((d[0], d[1] // 2, d[2] // 2, d[3] // 2), d[1:], strict=True)):
            for index in range(3):
                self._res(f"up{level}.{index}", cin if index == 0 else cout, cout, height, width)
            if level < 3:
                if level < 2:
                    self._conv(f"time{level}", cout, 2 * cout, (3, 1, 1), height, width)
                self._param(f"upsample{level}.w", (cout // 2, cout, 3, 3), 9 * cout)
                self._param(f"upsample{level}.b", (cout // 2,), 100)
                self.plan.append(("upsample", level))
                height, width = 2 * height, 2 * width
        self._param("out.gamma", (dim,), 1)
        self._conv("out", dim, 3, (3, 3, 3), height, width)
        self.folded: dict[str, torch.Tensor] = {}

    def _param(self, name, shape, fan):
        value = torch.randn(shape, generator=self.generator) / fan**0.5
        self.weights[name] = (value.abs() + 0.5 if name.endswith("gamma") else value).to(self.device, self.dtype)

    def _conv(self, name, cin, cout, kernel, height, width):
        self._param(name + ".w", (cout, cin, *kernel), cin * kernel[0] * kernel[1] * kernel[2])
        self._param(name + ".b", (cout,), 100)
        if kernel[0] > 1:
            self.past_shapes[name] = (1, cin, 2, height, width)

    def _res(self, name, cin, cout, height, width):
        self._param(name + ".gamma1", (cin,), 1)
        self._conv(name + ".conv1", cin, cout, (3, 3, 3), height, width)
        self._param(name + ".gamma2", (cout,), 1)
        self._conv(name + ".conv2", cout, cout, (3, 3, 3), height, width)
        if cin != cout:
            self._conv(name + ".short", cin, cout, (1, 1, 1), height, width)
        self.plan.append(("res", name))

    def past(self):
        generator = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(shape[1], 1, 1, 1, generator=generator).expand(shape).to(self.device, self.dtype)
            .contiguous(memory_format=torch.channels_last_3d)
            for name, shape in self.past_shapes.items()
        }  # fmt: skip

    def channels_last(self):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for name, value in self.weights.items():
            if value.dim() in formats:
                self.weights[name] = value.contiguous(memory_format=formats[value.dim()])
        return self

    def attention(self, x):
        """x: [T, C, H, W] channels-last."""
        frames, channels, height, width = x.shape
        normed = (
            functional.normalize(x.float(), dim=1).to(x.dtype)
            * channels**0.5
            * self.weights["attn.gamma"].view(-1, 1, 1)
        )
        qkv = functional.conv2d(normed, self.weights["attn.qkv.w"])
        q, k, v = qkv.permute(0, 2, 3, 1).reshape(frames, 1, height * width, 3 * channels).chunk(3, dim=-1)
        seen = (
            functional.scaled_dot_product_attention(q, k, v)[:, 0]
            .reshape(frames, height, width, channels)
            .permute(0, 3, 1, 2)
        )
        return x + functional.conv2d(seen, self.weights["attn.proj.w"])

    def plain(self, z, past):
        """z: [1, 16, 1, h, w] -> pixels [1, 3, 4, 8h, 8w]; replaces `past`'s values."""
        w = self.weights

        def conv(name, x):
            out, past[name] = causal(x, past[name], w[name + ".w"], w[name + ".b"])
            return out

        x = conv("in", z)
        for kind, name in self.plan:
            if kind == "res":
                h = (
                    x
                    if f"{name}.short.w" not in w
                    else functional.conv3d(x, w[f"{name}.short.w"], w[f"{name}.short.b"])
                )
                x = conv(f"{name}.conv1", rms_silu(x, w[f"{name}.gamma1"]))
                x = conv(f"{name}.conv2", rms_silu(x, w[f"{name}.gamma2"])) + h
            elif kind == "attention":
                x = self.attention(x[0].transpose(0, 1)).transpose(0, 1)[None]
            else:
                frames = x[0].transpose(0, 1)
                if name < 2:
                    pairs = conv(f"time{name}", x)[0].unflatten(0, (2, -1))
                    frames = pairs.permute(2, 0, 1, 3, 4).flatten(0, 1)
                frames = functional.interpolate(frames.float(), scale_factor=2, mode="nearest-exact").to(x.dtype)
                frames = functional.conv2d(frames, w[f"upsample{name}.w"], w[f"upsample{name}.b"], padding=1)
                x = frames.unsqueeze(0).transpose(1, 2)
        return conv("out", rms_silu(x, w["out.gamma"]))

    def fold(self):
        for name, value in self.weights.items():
            if value.dim() == 5 and value.shape[2] == 3:
                flat = value.transpose(1, 2).flatten(1, 2)
                self.folded[name] = flat.contiguous(memory_format=torch.channels_last)
            elif name.startswith("upsample") and value.dim() == 4:
                self.folded[name] = subpixel(value).contiguous(memory_format=torch.channels_last)
        return self

    def fused(self, z, past):
        """As `plain`; past: [2, H, W, C] of each convolution."""
        w, folded = self.weights, self.folded

        def conv(name, stacked, padding=1):
            return nhwc(functional.conv2d(nchw(stacked), folded[name + ".w"], None, padding=padding))

        def stacked(name, x, **more):
            out, past[name], total = stack(x, past[name], **more)
            return out, total

        x = conv("in", stacked("in", z[0].permute(1, 2, 3, 0).contiguous())[0])
        bias, residual, shuffled = w["in.b"], None, False
        for kind, name in self.plan:
            more = {"bias": bias, "residual": residual, "shuffled": shuffled}
            if kind == "res":
                ready, total = stacked(f"{name}.conv1", x, gamma=w[f"{name}.gamma1"], want_sum=True, **more)
                x = conv(f"{name}.conv1", ready)
                ready, _ = stacked(f"{name}.conv2", x, gamma=w[f"{name}.gamma2"], bias=w[f"{name}.conv1.b"])
                x = conv(f"{name}.conv2", ready)
                bias, residual, shuffled = w[f"{name}.conv2.b"], total, False
                if f"{name}.short.w" in w:
                    residual = functional.linear(total, w[f"{name}.short.w"].flatten(1), w[f"{name}.short.b"])
            elif kind == "attention":
                x = nhwc(self.attention(nchw(x + bias + residual)))
                bias = residual = None
            else:
                if name < 2:
                    ready, _ = stacked(f"time{name}", x, **more)
                    pairs = functional.linear(ready, folded[f"time{name}.w"].flatten(1), w[f"time{name}.b"])
                    x = pairs.unflatten(-1, (2, -1)).movedim(-2, 1).flatten(0, 1).contiguous()
                else:
                    x = x + bias + residual
                x = nhwc(functional.conv2d(nchw(x), folded[f"upsample{name}.w"], None, padding=1))
                bias, residual, shuffled = w[f"upsample{name}.b"], None, True
        ready, _ = stacked("out", x, gamma=w["out.gamma"], bias=bias, residual=residual, shuffled=shuffled)
        pixels = conv("out", ready) + w["out.b"]
        return pixels.permute(3, 0, 1, 2)[None]


def nchw(x):
    return x.permute(0, 3, 1, 2)


def nhwc(x):
    return x.permute(0, 2, 3, 1)


def subpixel(w):
    """[O, C, 3, 3] behind nearest upsampling -> [4 O, C, 2, 2] before it."""
    dtype, w = w.dtype, w.float()
    rows = torch.stack((torch.stack((w[:, :, 0], w[:, :, 1] + w[:, :, 2]), 2),
                        torch.stack((w[:, :, 0] + w[:, :, 1], w[:, :, 2]), 2)))  # fmt: skip
    both = torch.stack((torch.stack((rows[..., 0], rows[..., 1] + rows[..., 2]), -1),
                        torch.stack((rows[..., 0] + rows[..., 1], rows[..., 2]), -1)), 1)  # fmt: skip
    return both.flatten(0, 2).to(dtype)
