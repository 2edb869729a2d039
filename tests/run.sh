#!/usr/bin/env bash
# bash tests/run.sh [pytest arguments]: the gate. Lint, types, and all tests but the slow ones; of
# campaigns as many cases as fit their seconds, drawn with the commit as the seed (tests/draw.py).
# Its bar is 8 minutes on two cores that are quiet: 16 CPU minutes with types and lint.
# bash tests/run.sh --all [pytest arguments]: every test and every case; without arguments, also the
# oldest versions of what integrations are for, and ten mutants that tests must kill.
# Both in a .venv of this checkout; seconds of each test are in runs/times.tsv then (tests/times.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/setup_venv.sh
setup_venv test
unset PYTHONDONTWRITEBYTECODE  # without bytecode each process compiles torch: 8 s, not 2.5

select=()
if [ "${1:-}" = --all ]; then select=(-m ""); shift; fi
whole=$((${#select[@]} > 0 && $# == 0))

python -m ruff check .
python -m ruff format --check .
python -m mypy --cache-dir .venv/mypy >.venv/mypy.log 2>&1 & types=$!  # one process, while tests wait for disks

export HETERO_PARANOID="${HETERO_PARANOID:-1}" OMP_NUM_THREADS=1
python -m pytest -n 2 --dist worksteal ${select[@]+"${select[@]}"} "$@" && failed=0 || failed=$?
wait $types || failed=1
cat .venv/mypy.log
if [ $failed = 0 ] && [ $whole = 1 ]; then
  bash tests/oldest.sh
  python -m tests.mutants --sample 10
fi
exit $failed
