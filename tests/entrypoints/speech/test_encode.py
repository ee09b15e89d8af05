# SPDX-License-Identifier: Apache-2.0
"""Encoded audio files can be decoded, whether they are written at once or streamed."""

import io
import wave

import av
import pytest
import torch

from vllm_omni.entrypoints.speech.encode import MEDIA_TYPES, make_encoder, pcm16, wav_file

RATE = 24_000
TONE = 0.5 * torch.sin(torch.arange(RATE) * 2 * torch.pi * 440 / RATE)


def in_pieces(audio_format: str) -> bytes:
    encoder = make_encoder(audio_format, RATE)
    return b"".join(encoder.feed(part) for part in TONE.split(5000)) + encoder.finish()


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac", "wav"])
def test_a_streamed_file_decodes_to_the_tone(audio_format: str) -> None:
    """A one-second tone keeps its duration, pitch and loudness when it is encoded as a streamed
    file and then decoded. Lossy formats may pad the sound.
    """
    with av.open(io.BytesIO(in_pieces(audio_format))) as container:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    sound = torch.cat([torch.from_numpy(frame.to_ndarray()).reshape(-1) for frame in frames])
    assert abs(len(sound) - RATE) < 0.15 * RATE
    spectrum = torch.fft.rfft(sound[4000:20000]).abs()
    assert abs(float(spectrum.argmax()) * RATE / 16000 - 440) < 3
    assert abs(float(sound[4000:20000].std()) - float(TONE.std())) < 0.05


def test_pcm_and_whole_wav_are_the_same_samples() -> None:
    assert in_pieces("pcm") == in_pieces("pcm16") == pcm16(TONE)
    with wave.open(io.BytesIO(wav_file(TONE, RATE))) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (RATE, RATE, 1)
        assert file.readframes(RATE) == pcm16(TONE)


def test_loud_samples_are_clipped_not_wrapped() -> None:
    assert pcm16(torch.tensor([2.0, -2.0])) == b"\xff\x7f\x01\x80"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=", ".join(MEDIA_TYPES)):
        make_encoder("midi", RATE)
