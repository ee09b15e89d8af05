# Shared by scripts that measure many things on one GPU within a fixed time: `part`, and `show` at the end.
# Read from them: OUT, a folder for what comes back; SECONDS_IN_ALL; PARTS, names of the only parts to run; PYTHON.
set -u
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

show() { # the results in short, and the end of the log of each part that failed
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
}
