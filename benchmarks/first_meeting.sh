#!/usr/bin/env bash
# Everything that needs a GPU and has little time there, on two GPUs side by side, in at most SECONDS_IN_ALL seconds:
# Wan 2.2 (both models, both experts), Qwen2.5-Omni 7B, a causal Wan stream, its `tiny_vae` ladder, then the AR worker's
# engine tests on CUDA. Weights are random and drawn on the GPU; nothing is fetched.
#
#     OUT=folder bash benchmarks/first_meeting.sh           # summary.txt, results.tgz, logs.tgz, ar_compatibility.json
#     OUT=folder TINY=1 bash benchmarks/first_meeting.sh    # the same with tiny models on a CPU, to try it
#     OUT=folder PARTS="ti2v_5b ar_v2" bash benchmarks/first_meeting.sh   # only these
#
# The timed parts took 261 s on two H200s; the AR parts after them do not all fit into the same call: name them in PARTS
# for one of their own. A part that fails or runs out of its time does not stop the others. The outcomes of the AR tests are also written into
# docs/architecture (scripts/ar_compatibility.py).
set -u
cd "$(dirname "$0")/.."
: "${OUT:?a folder for what comes back}" "${SECONDS_IN_ALL:=470}" "${TINY:=}" "${PARTS:=}" "${PYTHON:=python3}"
WORK=$(mktemp -d)
mkdir -p "$OUT" "$WORK/logs" "$WORK/results"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# No NVLink multicast: a program that ends badly while it uses it can leave the GPUs of a shared host unusable.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}

# What has been made so far, in four files.
collect() {
  (
    flock 9
    tar czf "$OUT/logs.tgz" -C "$WORK" logs
    tar czf "$OUT/results.tgz" -C "$WORK" results
    cp docs/architecture/ar_compatibility.json "$OUT/"
  ) 9>"$WORK/lock"
}

# part NAME GPUS LIMIT_S COMMAND...: runs the command on these GPUs, at most so long; true if it succeeded.
part() {
  local name=$1 gpus=$2 limit=$3 began=$SECONDS rc=0 left
  shift 3
  if [ -n "$PARTS" ] && [[ " $PARTS " != *" $name "* ]]; then return 0; fi
  left=$((SECONDS_IN_ALL - SECONDS - 5))
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: not begun, $left s were left" | tee -a "$OUT/summary.txt"
    return 1
  fi
  CUDA_VISIBLE_DEVICES=$gpus timeout -k 5 "$limit" "$@" >"$WORK/logs/$name.log" 2>&1 || rc=$?
  echo "$name: exit $rc after $((SECONDS - began)) s (began at $began, limit $limit), GPU $gpus" | tee -a "$OUT/summary.txt"
  collect
  return $rc
}

bench() { # bench NAME GPUS LIMIT_S SCRIPT OPTIONS...
  local name=$1 gpus=$2 limit=$3 script=$4
  shift 4
  part "$name" "$gpus" "$limit" "$PYTHON" "benchmarks/$script" "$@" ${TINY:+$TINY_OPTIONS} --out "$WORK/results"
}

ar() { # ar NAME GPUS LIMIT_S TESTS (an expression of pytest's -k)
  part "$1" "$2" "$3" "$PYTHON" scripts/ar_compatibility.py -m cuda -k "$4" -vv -p no:cacheprovider --durations=0 --tb=short
}

wan_2_2_and_streams() {
  TINY_OPTIONS="--tiny"
  bench a14b 0 220 wan2_2.py --size t2v-a14b --steps 6
  TINY_OPTIONS="--size tiny --height 64 --width 96 --chunks 8"
  bench streaming_wan 0 120 streaming_wan.py
  TINY_OPTIONS="--tiny"
  bench tiny_vae_ladder 0 100 streams_per_gpu.py --streams 2 3 --policies deadline --chunks 8 --most-seconds 12 \
    --omni-options '{"degradations": ["tiny_vae"]}' --name streams_per_gpu_tiny_vae_ladder
}

ti2v_and_speech() {
  TINY_OPTIONS="--tiny"
  bench ti2v_5b 1 120 wan2_2.py --size ti2v-5b --steps 10 --requests 2
  local sizes="--full-size --requests 2 --warmup 1"
  if [ -n "$TINY" ]; then sizes="--requests 1 --warmup 1"; fi
  TINY_OPTIONS=""
  # Without CUDA graphs if they are what fails: three engines that start and speak are worth more than none.
  bench omni 1 230 omni_pipeline.py $sizes || bench omni_eager 1 130 omni_pipeline.py $sizes --enforce-eager
}

wan_2_2_and_streams &
ti2v_and_speech &
wait

# Nothing is timed from here on, and these engines measure no memory. One engine a part, and at most two parts at once:
# six at once start so slowly, each compiling, that four of them ran out of 150 s.
ar_on_gpu_0() {
  ar ar_v2 0 150 "test_ar_engine_cuda and V2"
  ar ar_v2_exact 0 150 "test_ar_engine_cuda and (untouched or options_are_as_stock or stop_string)"
  ar ar_v2_no_scheduler 0 150 "without_the_scheduler"
  ar ar_v2_no_worker 0 150 "without_the_worker"
}

ar_on_gpu_1() {
  ar ar_v2_ngram 1 150 "rejected_drafts_have_no_row"
  ar ar_v2_eagle 1 150 "read_the_same_layers"
  ar ar_v2_adapters 1 150 "rows_are_the_adapters"
  ar ar_v2_images 1 150 "test_images"
}

ar_on_gpu_0 &
ar_on_gpu_1 &
wait
ar ar_v2_tensor 0,1 150 "two_tensor_ranks"
ar ar_v2_stages 0,1 150 "two_stages"
ar ar_v2_engines 0,1 150 "two_engines"
ar ar_v2_torchrun 0,1 150 "torchrun_tensor_parallel"
"$PYTHON" scripts/ar_compatibility.py --render
collect
echo "in all: $SECONDS s" | tee -a "$OUT/summary.txt"
grep -hE "::.* (PASSED|FAILED|ERROR|SKIPPED)" "$WORK"/logs/ar_*.log | sort -u
for log in "$WORK"/logs/*.log; do
  if ! grep -q "^$(basename "$log" .log): exit 0" "$OUT/summary.txt"; then
    echo "--- end of $(basename "$log")"
    tail -n 12 "$log" | cut -c 1-300
  fi
done
