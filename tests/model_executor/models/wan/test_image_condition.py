# SPDX-License-Identifier: Apache-2.0
"""The streamed image condition is bit-identical to the whole clip's condition, constant once it has
settled, and separate for each session.
"""

import pytest
import torch
from helpers.golden import golden_folder
from safetensors.torch import load_file

from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.images import clip_cache
from vllm_omni.model_executor.models.wan.images.clip_cache import clip_key
from vllm_omni.model_executor.models.wan.images.files import prepare_image
from vllm_omni.model_executor.models.wan.images.image_condition import ConditionState, GreyCondition
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig
from vllm_omni.outputs import RequestFailed

GOLDEN = golden_folder("lingbot")


@pytest.fixture(scope="module")
def condition() -> GreyCondition:
    vae = StreamingWanVAE(VAEConfig(base_dim=4), decoder=False)
    load_vae(vae, GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    return GreyCondition(vae)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return load_file(GOLDEN / "vae.safetensors")["image"][None, :, None]


def stream(
    condition: GreyCondition, image: torch.Tensor, chunks: list[int], key: bytes | None = None
) -> tuple[torch.Tensor, ConditionState]:
    parts, state = [], None
    for index, num_latents in enumerate(chunks):
        new = (image, num_latents, state, key) if index == 0 else (None, num_latents, state)
        y, state = condition.next(*new)
        parts.append(y)
    assert state is not None
    return torch.cat(parts, dim=1), state.resolved()


@pytest.mark.parametrize("chunks", [[3, 3, 3], [1, 4, 4], [9]])
def test_a_streamed_condition_equals_the_original_whole_clip(condition, image, chunks):
    """For any chunk size, the condition consists of a mask that is 1 only at the image's frame,
    followed by the latents of the image and of grey frames.
    """
    y, _ = stream(condition, image, chunks)
    assert y.shape == (20, 9, 2, 3)
    assert y.dtype == torch.float32
    mask = torch.zeros(4, 9, 2, 3)
    mask[:, 0] = 1
    assert torch.equal(y[:4], mask)
    recorded = load_file(GOLDEN / "vae.safetensors")["cond_latent"][0]
    torch.testing.assert_close(y[4:], recorded, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2**-8), (torch.bfloat16, 2**-5)])
def test_a_condition_settles_when_changes_are_negligible(image, dtype, tolerance):
    """The encoder stops before its output is bit-constant. From then on, a latent close to the one
    that the encoder would return is repeated.

    Relative to the latents' standard deviation, the error is at most one bf16 rounding error in
    fp32, and a few rounding errors in bf16.
    """
    vae = StreamingWanVAE(VAEConfig(base_dim=4), decoder=False, dtype=dtype)
    load_vae(vae, GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    condition = GreyCondition(vae)
    y, state = stream(condition, image, [3] * 14)
    clip = torch.zeros(1, 3, 165, 16, 24)
    clip[:, :, :1] = image
    whole = vae.encode(clip, None)[0][0]
    assert state.settled
    until = state.num_encoded
    assert 9 <= until <= 24
    assert torch.equal(y[4:, :until], whole[:, :until])
    assert (y[4:] - whole).abs().max() <= tolerance * whole[:, -1].std()
    first_equal = next(
        frame for frame in range(1, 42) if torch.equal(whole[:, frame], whole[:, frame - 1])
    )
    assert until < first_equal


@pytest.mark.parametrize("chunks", [[42], [20, 22], [7] * 6])
def test_an_asynchronous_host_gets_the_same_condition(condition, image, chunks, monkeypatch):
    """If the host cannot yet read whether the condition has settled, the encoder also encodes the
    rest of the chunk in which the condition settles.
    """
    expected_y, expected = stream(condition, image, chunks)
    monkeypatch.setattr(GreyCondition, "_is_readable", staticmethod(lambda flag: False))
    y, state = stream(condition, image, chunks)
    assert torch.equal(y, expected_y)
    assert state.settled and state.cache is None and state.num_encoded == expected.num_encoded
    assert torch.equal(state.last_1CFhw, expected.last_1CFhw)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_condition_does_not_wait_for_the_gpu(image):
    vae = StreamingWanVAE(VAEConfig(base_dim=4), decoder=False)
    load_vae(vae, GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    condition = GreyCondition(vae.to("cuda"))
    condition.next(image.cuda(), 3, None)
    pixels = image.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, state = condition.next(pixels, 3, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    state = state.resolved()
    assert state.num_encoded == 3 and not state.settled


def test_a_settled_condition_needs_no_encoder(condition, image, monkeypatch):
    """Once the condition has settled, later chunks do not run the encoder, and its cache is
    freed.
    """
    _, state = stream(condition, image, [3] * 14)
    monkeypatch.setattr(condition.vae, "encode", None)
    y, after = condition.next(None, 3, state)
    assert after is state
    assert state.nbytes == 16 * 2 * 3 * 4
    assert torch.equal(y[4:, 0], y[4:, 2])


SETTLES = [3] * 14


@pytest.fixture
def sharing(condition: GreyCondition) -> GreyCondition:
    """A condition whose clip cache is empty."""
    return GreyCondition(condition.vae)


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("chunks", [SETTLES, [1, 4, 4, 20], [42]])
def test_a_known_image_needs_no_encoder(sharing, image, chunks, readable, monkeypatch):
    """The encoder runs only for the first session with an image, and the conditioning of later
    sessions is bit-identical, for chunks of any size.
    """
    if not readable:
        monkeypatch.setattr(GreyCondition, "_is_readable", staticmethod(lambda flag: False))
    _, first = stream(sharing, image, SETTLES, key=b"pond")
    expected, settled = stream(sharing, image, chunks)
    monkeypatch.setattr(sharing.vae, "encode", None)
    y, state = stream(sharing, image, chunks, key=b"pond")
    assert torch.equal(y, expected)
    assert state.settled and state.num_encoded == settled.num_encoded == first.num_encoded
    assert torch.equal(state.last_1CFhw, settled.last_1CFhw)


def test_a_state_of_a_known_image_is_no_larger_than_announced(sharing, image):
    stream(sharing, image, SETTLES, key=b"pond")
    _, state = sharing.next(image, 1, None, b"pond")
    assert state.last_1CFhw.shape[2] > 3
    assert state.nbytes == state.last_1CFhw.nbytes <= sharing.state_nbytes(16, 24)


def test_sessions_encode_a_clip_between_them(sharing, image, monkeypatch):
    """A session that ends early leaves its frames to the next session, which adds the rest."""
    expected, _ = stream(sharing, image, SETTLES)
    stream(sharing, image, [3, 3], key=b"pond")
    assert sharing.clips.find(b"pond") is None
    y, _ = stream(sharing, image, SETTLES, key=b"pond")
    assert torch.equal(y, expected)
    monkeypatch.setattr(sharing.vae, "encode", None)
    assert torch.equal(stream(sharing, image, SETTLES, key=b"pond")[0], expected)


def test_the_encoder_runs_again_for_an_evicted_image(sharing, image, monkeypatch):
    """Each image has its own clip. The clips that were not used for the longest time are evicted
    when all together exceed the limit.
    """
    images = {b"%d" % number: image * (1 - number / 8) for number in range(4)}
    expected = {key: stream(sharing, each, SETTLES)[0] for key, each in images.items()}
    _, state = stream(sharing, image, SETTLES, key=b"0")
    one_clip = sharing.clips.nbytes
    assert one_clip == (state.num_encoded + 1) * state.nbytes
    monkeypatch.setattr(clip_cache, "_MAX_BYTES", 3 * one_clip + one_clip // 2)
    for key in (b"1", b"2", b"0", b"3"):
        assert torch.equal(stream(sharing, images[key], SETTLES, key=key)[0], expected[key])
    known = [key for key in images if sharing.clips.find(key) is not None]
    assert b"1" not in known and {b"0", b"3"} <= set(known)
    assert sharing.clips.nbytes <= 3.5 * one_clip
    calls = []
    encode = sharing.vae.encode
    monkeypatch.setattr(sharing.vae, "encode", lambda *args: calls.append(1) or encode(*args))
    for key in images:
        calls.clear()
        assert torch.equal(stream(sharing, images[key], SETTLES, key=key)[0], expected[key])
        if key in (b"0", b"1"):
            assert bool(calls) == (key == b"1")
    sharing.clips.clear()
    assert sharing.clips.nbytes == 0 and sharing.clips.find(b"0") is None


@pytest.mark.parametrize(
    ("frames", "fits"), [(1, True), (5, True), (64, True), (0, False), (65, False)]
)
def test_a_restored_state_has_a_limited_number_of_frames_ahead(condition, frames, fits):
    class Saved:
        def shape(self, name):
            return [1, 16, frames, 2, 3]

        def take_tensor(self, name, device, dtype, shape):
            if list(shape) != self.shape(name):
                raise RequestFailed("invalid_snapshot", name)
            return torch.zeros(shape, dtype=dtype)

    layout = condition.state_layout(16, 24)
    if fits:
        assert layout.restore(Saved(), "cpu", settled=True, num_encoded=2).nbytes == frames * 384
    else:
        with pytest.raises(RequestFailed, match="invalid_snapshot: last"):
            layout.restore(Saved(), "cpu", settled=True, num_encoded=2)


def test_only_conditions_that_stream_share_clips(condition, image):
    other = GreyCondition(condition.vae, "second_chunk")
    stream(other, image, SETTLES, key=b"pond")
    assert other.clips.find(b"pond") is None


def test_the_key_of_a_clip_depends_on_image_and_size():
    image = torch.zeros(8, 8, 3, dtype=torch.uint8)
    changed = image.clone()
    changed[7, 7, 2] = 1
    keys = [
        clip_key(image, 16, 16),
        clip_key(image, 16, 32),
        clip_key(changed, 16, 16),
        clip_key(image.view(4, 16, 3), 16, 16),
        clip_key(image.permute(2, 0, 1).float(), 16, 16),
    ]
    assert len(set(keys)) == len(keys)
    assert clip_key(image.clone(), 16, 16) == keys[0]


def test_a_new_image_restarts_the_condition(condition, image):
    """A new image in the middle of a session restarts the condition: the mask marks the new image's
    frame, and the latents are the same as in a new session.
    """
    _, state = stream(condition, image, [3, 3])
    switched, _ = condition.next(-image, 3, state)
    fresh, _ = condition.next(-image, 3, None)
    assert torch.equal(switched, fresh)


def test_a_condition_without_image_or_state_is_refused(condition):
    with pytest.raises(ValueError, match="starts with an image"):
        condition.next(None, 3, None)


def test_the_condition_needs_an_encoder():
    with pytest.raises(ValueError, match="encoder=True"):
        GreyCondition(StreamingWanVAE(VAEConfig(base_dim=4), encoder=False))


def test_prepare_image_resizes_as_torch_bicubic_without_antialiasing():
    """Images are resized as in the reference preprocessing: with bicubic interpolation on values
    from -1 to 1, without antialiasing and without clamping overshoots.
    """
    image = torch.rand(3, 40, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate((image * 2 - 1)[None], size=(16, 32), mode="bicubic")
    assert torch.equal(prepare_image(image, 16, 32)[:, :, 0], expected)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            torch.zeros(3, 8, 8, dtype=torch.uint8),
            r"uint8 image must be \[height, width, 3\], got \[3, 8, 8\]",
        ),
        (torch.zeros(8, 8, 3), r"float \[3, h, w\]"),
        (torch.zeros(3, 8, 8, dtype=torch.int32), "torch.int32"),
        (torch.full((3, 8, 8), 1.5), "from 0 to 1"),
        (torch.full((3, 8, 8), float("nan")), "from 0 to 1"),
        (torch.zeros(0, 8, 3, dtype=torch.uint8), "empty: 0 x 8"),
    ],
)
def test_images_of_another_shape_or_dtype_are_refused(image, message):
    """Images with an unsupported shape or dtype are rejected with an error that states the received
    and the allowed values.
    """
    with pytest.raises(ValueError, match=message):
        prepare_image(image, 16, 16)
