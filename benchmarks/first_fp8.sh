#!/usr/bin/env bash
# FP8 measured for the first time, on one GPU, in at most SECONDS_IN_ALL seconds: LingBot chunks at full size in bf16 and in
# every FP8 method, with FP8 keys and values too; time and error of each kind of product; the village against its truth; and
# small checkpoints in the formats that a CPU cannot compute in. Weights are random but for the village; nothing is fetched.
#
#     OUT=folder bash benchmarks/first_fp8.sh           # summary.txt, results.tgz, logs.tgz
#     OUT=folder TINY=1 bash benchmarks/first_fp8.sh    # the same with tiny models on a CPU, to try it
#     OUT=folder PARTS="products chunk_bf16 chunk_fp8_per_channel" bash benchmarks/first_fp8.sh    # only these
#
# The most important parts come first; a part that fails or runs out of its time does not stop the others. One call of ten
# minutes on an H200 (the `run` of the session's device): OUT=$OUT SECONDS_IN_ALL=580 bash benchmarks/first_fp8.sh
# What does not fit into it is named in summary.txt ("not begun"): name these in PARTS for the next call.
set -u
cd "$(dirname "$0")/.."
: "${OUT:?a folder for what comes back}" "${SECONDS_IN_ALL:=580}" "${TINY:=}" "${PARTS:=}" "${PYTHON:=python3}"
WORK=$(mktemp -d)
mkdir -p "$OUT" "$WORK/logs" "$WORK/results"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}

# part NAME LIMIT_S COMMAND...: runs the command at most so long; true if it succeeded.
part() {
  local name=$1 limit=$2 began=$SECONDS rc=0 left
  shift 2
  if [ -n "$PARTS" ] && [[ " $PARTS " != *" $name "* ]]; then return 0; fi
  left=$((SECONDS_IN_ALL - SECONDS - 5))
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: not begun, $left s were left" | tee -a "$OUT/summary.txt"
    return 1
  fi
  timeout -k 5 "$limit" "$@" >"$WORK/logs/$name.log" 2>&1 || rc=$?
  echo "$name: exit $rc after $((SECONDS - began)) s (began at $began, limit $limit)" | tee -a "$OUT/summary.txt"
  tar czf "$OUT/logs.tgz" -C "$WORK" logs
  tar czf "$OUT/results.tgz" -C "$WORK" results
  return $rc
}

chunk() { # chunk NAME OPTIONS...: LingBot's chunk time, stages and memory
  local name=$1 sizes="--chunks 12"
  shift
  if [ -n "$TINY" ]; then sizes="--tiny --height 32 --width 48 --chunks 8 --dtype bfloat16"; fi
  # The text encoder on the host, as the issue's target counts it.
  part "chunk_$name" 120 "$PYTHON" benchmarks/lingbot_world.py $sizes --name "lingbot_world_$name" \
    --model-options '{"text_encoder_device": "cpu"}' "$@" --out "$WORK/results"
}

village() { # village NAME OPTIONS...: PSNR and SSIM over held-out walks
  local name=$1 walks="--walks 8 --chunks 40"
  shift
  if [ -n "$TINY" ]; then walks="--walks 1 --chunks 2 --eager"; fi
  part "village_$name" 60 bash -c '"$0" -m training.tiny_world.score --model vllm_omni/worlds/village --json --drills \
    '"$walks"' "${@:2}" >"$1"' "$PYTHON" "$WORK/results/village_$name.json" "$@"
}

part products 90 "$PYTHON" benchmarks/fp8.py products ${TINY:+--tiny} --out "$WORK/results"
chunk bf16
chunk fp8_per_channel --quantization fp8_per_channel
chunk fp8_per_channel_kv --quantization fp8_per_channel --kv-cache-dtype fp8
village bf16 --dtype bfloat16
village fp8 --dtype bfloat16 --quantization fp8_per_channel
village fp8_kv --dtype bfloat16 --quantization fp8_per_channel --kv-cache-dtype fp8
village kv --dtype bfloat16 --kv-cache-dtype fp8
part stored 90 "$PYTHON" benchmarks/fp8.py stored --out "$WORK/results"
chunk fp8_per_block --quantization fp8_per_block
chunk fp8_per_tensor --quantization fp8_per_tensor
chunk kv --kv-cache-dtype fp8
latents="--layers 8"
if [ -n "$TINY" ]; then latents="--tiny --height 32 --width 48"; fi
part latents 300 "$PYTHON" benchmarks/fp8.py latents $latents --out "$WORK/results"

echo "in all: $SECONDS s" | tee -a "$OUT/summary.txt"
"$PYTHON" - "$WORK/results" <<'PY'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    found = json.loads(path.read_text() or "{}")
    result = found.get("result", found)
    shown = {key: result[key] for key in ("chunk_interval_ms", "stages_ms", "device_memory", "session_bytes") if key in result}
    print(path.stem, json.dumps(shown or result)[:600])
PY
for log in "$WORK"/logs/*.log; do
  if ! grep -q "^$(basename "$log" .log): exit 0" "$OUT/summary.txt"; then
    echo "--- end of $(basename "$log")"
    tail -n 12 "$log" | cut -c 1-300
  fi
done
