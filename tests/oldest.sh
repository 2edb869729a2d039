#!/usr/bin/env bash
# The tests of accelerate, Transformers and PEFT with the oldest versions that hetero works with:
# bash tests/oldest.sh [pytest arguments]. They lie in .venv/oldest, before those of the .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/setup_venv.sh
setup_venv test

oldest="$PWD/.venv/oldest"
if ! cmp -s tests/oldest.txt "$oldest/installed.txt"; then
  rm -rf "$oldest"
  python -m pip install -q --no-compile --no-deps --target "$oldest" -r tests/oldest.txt
  cp tests/oldest.txt "$oldest/installed.txt"
fi

export HETERO_PARANOID="${HETERO_PARANOID:-1}" OMP_NUM_THREADS=1 PYTHONPATH="$oldest"
loads="tests/integrations/test_pretrained.py::test_a_model_is_what_transformers_loads"
if [ $# -eq 0 ]; then  # without those that start processes
  set -- tests/integrations/test_{accelerate,trainer}.py "$loads"[{llama-1GB,bert-20KB,t5-20KB}] \
    -k "not processes and not launcher and not ranks and (not trainer or same_numbers or resumed)"
fi
python -m pytest -n 2 --dist worksteal "$@"
