#!/usr/bin/env bash
# FP8 measured for the first time, on one GPU, in at most SECONDS_IN_ALL seconds: LingBot chunks at full size in bf16 and in
# every FP8 method, with FP8 keys and values too; time and error of each kind of product; the village against its truth; and
# small checkpoints in the formats that a CPU cannot compute in. Weights are random but for the village; nothing is fetched.
#
#     OUT=folder bash benchmarks/first_fp8.sh           # summary.txt, results.tgz, logs.tgz
#     OUT=folder TINY=1 bash benchmarks/first_fp8.sh    # the same with tiny models on a CPU, to try it
#     OUT=folder PARTS="products chunk_bf16 chunk_fp8_per_channel" bash benchmarks/first_fp8.sh    # only these
#
# The most important parts come first; a part that fails or runs out of its time does not stop the others. Parts that do
# not fit into the time are named in summary.txt ("not begun"): name these in PARTS for the next call.
cd "$(dirname "$0")/.."
. benchmarks/parts.sh

chunk() { # chunk NAME OPTIONS...: LingBot's chunk time, stages and memory
  local name=$1 sizes="--chunks 12"
  shift
  if [ -n "$TINY" ]; then sizes="--tiny --height 32 --width 48 --chunks 8 --dtype bfloat16"; fi
  part "chunk_$name" 170 "$PYTHON" benchmarks/lingbot_world.py $sizes --name "lingbot_world_$name" "$@" --out "$WORK/results"
}

village() { # village NAME OPTIONS...: PSNR and SSIM over held-out walks
  local name=$1 walks="--walks 8 --chunks 40 --gpu-memory-utilization 0.15"
  shift
  if [ -n "$TINY" ]; then walks="--walks 1 --chunks 2 --eager"; fi
  bash -c '"$0" -m training.tiny_world.score --model vllm_omni/worlds/village --json --drills \
    '"$walks"' "${@:2}" >"$1"' "$PYTHON" "$WORK/results/village_$name.json" "$@"
}

villages() { # at the same time: quality does not depend on time
  village bf16 --dtype bfloat16 &
  village fp8 --dtype bfloat16 --quantization fp8_per_channel &
  village fp8_kv --dtype bfloat16 --quantization fp8_per_channel --kv-cache-dtype fp8 &
  village kv --dtype bfloat16 --kv-cache-dtype fp8 &
  wait
}

fp8="--quantization fp8_per_channel"
on_host='{"text_encoder_device": "cpu"}' # as for a card of 48 GB

chunk fp8_per_channel $fp8 --kernels
chunk fp8_per_channel_kv $fp8 --kv-cache-dtype fp8 --model-options "$on_host"
export -f village villages
export PYTHON WORK TINY
part villages 300 bash -c villages
chunk bf16
part products 90 "$PYTHON" benchmarks/fp8.py products ${TINY:+--tiny} --out "$WORK/results"
part stored 90 "$PYTHON" benchmarks/fp8.py stored --out "$WORK/results"
chunk fp8_per_block --quantization fp8_per_block
chunk fp8_per_tensor --quantization fp8_per_tensor
chunk kv --kv-cache-dtype fp8
latents="--layers 8"
if [ -n "$TINY" ]; then latents="--tiny --height 32 --width 48"; fi
part latents 300 "$PYTHON" benchmarks/fp8.py latents $latents --out "$WORK/results"

show
