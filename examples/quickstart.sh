#!/usr/bin/env bash
# From a fresh clone to a first run: bash examples/quickstart.sh [arguments of `hetero train`]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tests/setup_venv.sh"
setup_venv
hetero train "$@"
