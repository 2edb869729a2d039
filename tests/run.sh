#!/usr/bin/env bash
# Lint, types and all tests, in a .venv of this checkout: bash tests/run.sh [pytest arguments].
# Without arguments, the tests of integrations with the oldest versions of these, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/setup_venv.sh
setup_venv test

python -m ruff check .
python -m ruff format --check .
python -m mypy >.venv/mypy.log 2>&1 & types=$!  # one process: the others have a core meanwhile

export HETERO_PARANOID="${HETERO_PARANOID:-1}" OMP_NUM_THREADS=1
if [ $# -eq 0 ]; then bash tests/oldest.sh; fi
wait $types || { cat .venv/mypy.log; exit 1; }
cat .venv/mypy.log
python -m pytest -n 2 --dist worksteal "$@"
