#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Measure a speech model's time to the first text and to the first audio.

Three real engines serve the model. The result states where the time is spent.

    # a tiny random model: engines, transport and queues
    python benchmarks/omni_pipeline.py --requests 20
    # the released 7B's sizes, random weights, on CUDA
    python benchmarks/omni_pipeline.py --full-size
    python benchmarks/omni_pipeline.py --model DIR               # a checkpoint

The real-time factor is the time from a request's arrival to its last audio, divided by the duration
of the audio. A factor below 1 means that audio is generated faster than it is played. `silence` is
the total time that a listener waits for later chunks if playback starts as soon as the first audio
chunk arrives. Random weights with the released shapes give the same times as trained weights. The
length of a response is set by options (`--reply-tokens`, `--codes`), because a random model does
not end its speech.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import common

RELEASED: dict[str, Any] = {
    "dtype": "bfloat16",
    "thinker_config": {
        "audio_config": {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "output_dim": 3584,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_parameters": {"mrope_section": [16, 24, 24]},
        },
    },
    "talker_config": {
        "vocab_size": 8448,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_mask_token_id": 8296,
        "embedding_size": 3584,
        "hidden_size": 896,
        "intermediate_size": 18944,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"mrope_section": [16, 24, 24]},
    },
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 22,
            "num_attention_heads": 16,
            "head_dim": 64,
            "emb_dim": 512,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
            "num_embeds": 8448,  # released: 8193; an untrained talker also generates control codes
            "mel_dim": 80,
            "enc_emb_dim": 192,
            "enc_dim": 128,
            "enc_channels": [256, 256, 256, 256, 768],
            "enc_attention_channels": 64,
            "enc_se_channels": 64,
        },
        "bigvgan_config": {"mel_dim": 80, "upsample_initial_channel": 1536},
    },
}
"""Sizes of Qwen2.5-Omni 7B, which replace the sizes in the tiny checkpoint's config. The token ids
of the tiny tokenizer are retained.
"""
REFERENCE_FRAMES = 300
"""Number of mel frames in the reference audio of a voice."""


def write_full_size(out: Path, sizes: dict[str, Any]) -> None:
    """Write a checkpoint with the given sizes. The engines generate the weights (`--load-format
    dummy`).

    The only weights written are the two embedding tables that the process between the engines
    reads. All other files come from the tiny checkpoint.
    """
    import torch
    from safetensors.torch import save_file

    from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import (
        TALKER_EMBEDDINGS,
        THINKER_EMBEDDINGS,
    )
    from vllm_omni.model_executor.models.registry import get_family

    get_family("qwen2_5_omni").make_tiny(out, 0, "original")
    config = _merged(json.loads((out / "config.json").read_text()), sizes)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    text, talker = config["thinker_config"]["text_config"], config["talker_config"]
    tables = {
        THINKER_EMBEDDINGS: _table(text["vocab_size"], text["hidden_size"]),
        TALKER_EMBEDDINGS: _table(talker["vocab_size"], talker["embedding_size"]),
    }
    for file in out.glob("model*.safetensors*"):
        file.unlink()
    save_file(tables, out / "model.safetensors")
    dit = config["token2wav_config"]["dit_config"]
    voices = torch.load(out / "spk_dict.pt", weights_only=True)
    for voice in voices.values():
        voice["cond"] = torch.randn(1, dit["enc_emb_dim"])
        voice["ref_mel"] = torch.randn(1, REFERENCE_FRAMES, dit["mel_dim"])
    torch.save(voices, out / "spk_dict.pt")


def _table(rows: int, width: int) -> Any:
    """Return a random table with repeated rows, because generating half a billion different values
    would take the host many seconds.
    """
    import torch

    block = (0.02 * torch.randn(min(rows, 4096), width)).bfloat16()
    return block.repeat(-(-rows // len(block)), 1)[:rows].contiguous()


def _merged(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Merge `sizes` into `config`, and remove the fields that a config class has derived from the
    old sizes.
    """
    merged = {
        name: value
        for name, value in config.items()
        if name not in ("layer_types", "max_window_layers")
    }
    for name, value in sizes.items():
        merged[name] = _merged(config.get(name) or {}, value) if isinstance(value, dict) else value
    return merged


class Listener:
    """Measures a request's audio, and the silence that a listener hears if the audio is played as
    it arrives.
    """

    def __init__(self) -> None:
        self.sound_s = self.silence_s = 0.0
        self._played_until_s: float | None = None

    def hear(self, samples: int, sample_rate: int) -> None:
        now_s, part_s = time.perf_counter(), samples / sample_rate
        deadline_s = now_s if self._played_until_s is None else self._played_until_s
        self.silence_s += max(0.0, now_s - deadline_s)
        self._played_until_s = max(now_s, deadline_s) + part_s
        self.sound_s += part_s


async def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    import msgspec
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    from vllm_omni.composition.speech import AudioChunk
    from vllm_omni.model_executor.models.qwen2_5_omni.engines import SpeechEngines
    from vllm_omni.model_executor.models.qwen2_5_omni.options import SpeechEngineOptions
    from vllm_omni.model_executor.models.qwen2_5_omni.speech import SpeechTimings

    start = time.perf_counter()
    load_format = "dummy" if args.full_size else "auto"
    talker = {
        "enforce_eager": args.enforce_eager,
        "max_model_len": args.max_model_len,
        "max_num_seqs": 4,
        "load_format": load_format,
    }
    engines = await SpeechEngines.start_engines(
        model,
        SpeechEngineOptions(talker=talker, token2wav={"load_format": load_format}),
        enforce_eager=args.enforce_eager,
        max_model_len=args.max_model_len,
        max_num_seqs=4,
        load_format=load_format,
        skip_mm_profiling=True,
        limit_mm_per_prompt={"image": 0, "audio": 0, "video": 0},
    )
    startup_s = time.perf_counter() - start
    composition = engines.composition
    rows: dict[str, list[float]] = {}
    sound_s: dict[str, list[float]] = {}
    factors: dict[str, list[float]] = {}
    try:
        for how_name, chunk in (("streamed", args.chunk_codes), ("whole_clip", 0)):
            how = msgspec.structs.replace(
                composition.defaults,
                chunk_codes=chunk,
                most_chunk_codes=args.most_chunk_codes,
                max_codes=args.codes,
            )
            for number in range(args.warmup + args.requests):
                timings, listener = SpeechTimings(), Listener()
                prompt = tokens_input(
                    prompt_token_ids=[5 + index % 40 for index in range(args.prompt_tokens)]
                )
                # Most token ids of a full-size random model do not exist in its tiny tokenizer.
                params = SamplingParams(
                    max_tokens=args.reply_tokens,
                    ignore_eos=True,
                    seed=number,
                    detokenize=not args.full_size,
                )
                name = f"{how_name}-{number}"
                async for event in composition.respond(
                    prompt, params, name, how, seed=number, timings=timings
                ):
                    if isinstance(event, AudioChunk):
                        listener.hear(len(event.samples), event.sample_rate)
                if number < args.warmup:
                    continue
                for mark, seconds in timings.marks_s.items():
                    rows.setdefault(f"{how_name}.{mark}", []).append(seconds * 1e3)
                rows.setdefault(f"{how_name}.silence", []).append(listener.silence_s * 1e3)
                sound_s.setdefault(how_name, []).append(listener.sound_s)
                if listener.sound_s:  # a talker may end its speech at the first code
                    factors.setdefault(how_name, []).append(
                        timings.marks_s["done"] / listener.sound_s
                    )
        memory = await composition.token2wav.engine.collective_rpc("device_memory")
    finally:
        engines.shutdown()
    return {
        "model": model_name(args),
        "eager": args.enforce_eager,
        "startup_s": round(startup_s, 2),
        "prompt_tokens": args.prompt_tokens,
        "reply_tokens": args.reply_tokens,
        "max_codes": args.codes,
        "chunk_codes": args.chunk_codes,
        "most_chunk_codes": args.most_chunk_codes,
        "requests": args.requests,
        "seconds_of_sound": {name: common.quantiles(values) for name, values in sound_s.items()},
        "real_time_factor": {name: common.quantiles(values) for name, values in factors.items()},
        "milliseconds_since_arrival": {
            name: common.quantiles(values) for name, values in rows.items()
        },
        "device_memory": memory[0],
        "note": "`token2wav` and `silence` are sums over pieces; every other mark counts from the "
        "request's arrival",
    }


def model_name(args: argparse.Namespace) -> str:
    if args.model is not None:
        return str(args.model.name)
    return "Qwen2.5-Omni 7B, random weights" if args.full_size else "tiny random Qwen2.5-Omni"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", type=Path, help="a Qwen2.5-Omni checkpoint; a tiny one is made if left out"
    )
    which.add_argument(
        "--full-size", action="store_true", help="the released 7B's sizes, random weights, on CUDA"
    )
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--reply-tokens", type=int, help="default: 24 (full size: 64)")
    parser.add_argument(
        "--codes", type=int, help="longest speech, 50 codes a second (default: 96; full size: 400)"
    )
    parser.add_argument("--chunk-codes", type=int, default=24, help="of the first piece of sound")
    parser.add_argument(
        "--most-chunk-codes", type=int, default=96, help="pieces double up to this; 24 = all alike"
    )
    parser.add_argument(
        "--name",
        help="name of the result file (default: omni_pipeline, or omni_pipeline_full_size)",
    )
    parser.add_argument("--max-model-len", type=int, help="default: 512 (full size: 2048)")
    parser.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="default: yes (full size: no, with CUDA graphs)",
    )
    common.add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    defaults = (64, 400, 2048, False) if args.full_size else (24, 96, 512, True)
    for name, value in zip(
        ("reply_tokens", "codes", "max_model_len", "enforce_eager"), defaults, strict=True
    ):
        if getattr(args, name) is None:
            setattr(args, name, value)
    common.restart_with(
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    )
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.full_size:
            write_full_size(model, RELEASED)
        elif args.model is None:
            from vllm_omni.model_executor.models.registry import get_family

            get_family("qwen2_5_omni").make_tiny(model, 0, "original")
        result = asyncio.run(measure(model, args))
    common.save(
        args.name or ("omni_pipeline_full_size" if args.full_size else "omni_pipeline"),
        result,
        args,
    )


if __name__ == "__main__":
    main()
