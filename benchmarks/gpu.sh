#!/usr/bin/env bash
# bash benchmarks/gpu.sh FOLDER [PART ...]: the first minutes on a GPU, from a clone; results in FOLDER.
# Parts, in this order: facts tests steps torch card calibrate large fsdp. Each has a limit of its
# own, and the whole has one (GPU_SECONDS, by default 600): what has no time left is said. Without an
# editable install, PYTHON is the interpreter that has torch.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1; shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
parts=" ${*:-facts tests steps torch card calibrate large fsdp} "
python=${PYTHON:-python3} total=${GPU_SECONDS:-600} begin=$(date +%s)
rows=(--output "$folder/rows.jsonl")
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
ulimit -l unlimited 2>/dev/null || true

part() {  # part NAME SECONDS COMMAND...: its output is in FOLDER/NAME.log
  local name=$1 limit=$2 left
  shift 2
  [[ $parts == *" $name "* ]] || return 0
  left=$((total - $(date +%s) + begin))
  if [ "$left" -lt 10 ]; then echo "$name: no time is left"; return 0; fi
  timeout -k 5 $((limit < left ? limit : left)) "$@" >"$folder/$name.log" 2>&1
  echo "[$(($(date +%s) - begin)) s] $name: exit status $?"
  grep -v '"status"' "$folder/$name.log" | tail -n 12 | cut -c 1-200
}

steps=("$python" -W ignore -m benchmarks.gpu "${rows[@]}")
if [ ! -e hetero/_update.so ]; then "$python" hatch_build.py || echo "updates run as torch's operations"; fi
part facts 60 bash -c "nvidia-smi; lscpu | head -n 25; free -g; df -h .; $python -m hetero doctor"
part tests 150 "$python" -m pytest -m "" -q -n 8 -p no:cacheprovider -W ignore --tb=short tests/gpu
part steps 60 "${steps[@]}" 1B --hbm 8GiB --tokens 4096 16384 --steps 8 --seconds 45 --kernels --record "$folder/run-1B"
part torch 40 "${steps[@]}" 8B --way torch --tokens 4096 --steps 3 --seconds 25 --kernels
part card 90 "${steps[@]}" 3B --card 24GiB --hbm 20GiB --tokens 4096 16384 --seconds 60
part calibrate 90 "$python" -m hetero calibrate --device cuda --output "$folder/machine.toml"
part large 120 "${steps[@]}" 8B --tokens 4096 --seconds 100 --kernels --record "$folder/run-8B"
part fsdp 90 "${steps[@]}" 3B --way fsdp --card 24GiB --tokens 4096 --steps 3 --seconds 40
