#!/usr/bin/env bash
# Models and options that no GPU has measured yet, on one GPU, in at most SECONDS_IN_ALL seconds: LingBot World v2's 1.3B,
# Matrix-Game 2.0 in each variant, Waypoint 1.5, and LoRA adapters. Weights are random; nothing is fetched.
#
#     OUT=folder bash benchmarks/first_worlds.sh           # summary.txt, results.tgz, logs.tgz
#     OUT=folder TINY=1 bash benchmarks/first_worlds.sh    # the same with tiny models on a CPU, to try it
#     OUT=folder PARTS="v2_1_3b matrix_game" bash benchmarks/first_worlds.sh    # only these
cd "$(dirname "$0")/.."
. benchmarks/parts.sh

world() { # world NAME SCRIPT OPTIONS...
  local name=$1 script=$2
  shift 2
  part "$name" 110 "$PYTHON" "benchmarks/$script" --name "$name" "$@" --out "$WORK/results"
}

if [ -n "$TINY" ]; then
  v2="--tiny --height 64 --width 96 --chunks 8 --dtype bfloat16" game=$v2
  waypoint="--tiny --height 40 --width 64 --chunks 12 --warm-chunks 6"
  lora="--size tiny --height 64 --width 96 --chunks 4 --warm-chunks 2 --rank 8"
else v2="--release v2_1_3b --chunks 20 --warm-chunks 8" game="" waypoint="" lora=""; fi
plain='{"cuda_graphs": false}'

world v2_1_3b_graphs lingbot_world.py $v2 --kernels
world matrix_game_graphs matrix_game.py $game --kernels
world waypoint_graphs waypoint.py $waypoint --kernels
world v2_1_3b_fp8 lingbot_world.py $v2 --quantization fp8_per_channel --kernels
world lora lora.py $lora
world matrix_game_gta matrix_game.py $game --variant gta_drive
world matrix_game_templerun matrix_game.py $game --variant templerun
world v2_1_3b lingbot_world.py $v2 --model-options "$plain"
world matrix_game matrix_game.py $game --model-options "$plain"
world waypoint waypoint.py $waypoint --model-options "$plain"
world waypoint_fp8 waypoint.py $waypoint --quantization fp8_per_channel --dtype bfloat16
show
