# Sourced by examples/quickstart.sh and tests/run.sh: `setup_venv [GROUP]` makes .venv at the root of
# the repository when it is missing, and activates it with hetero installed there; with a dependency
# group of pyproject.toml, as test, every extra and the group's tools too.

setup_venv() {
  local group="${1:-}" root system_packages="" extras=""
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  if [ ! -x "$root/.venv/bin/python" ]; then
    # A torch that the system has already is used: it may be built for this machine's GPU.
    if has_torch python3; then system_packages="--system-site-packages"; fi
    python3 -m venv $system_packages "$root/.venv"
  fi
  # shellcheck disable=SC1091
  source "$root/.venv/bin/activate"
  if ! has_torch python; then python -m pip install -q --no-compile "torch==2.13.0"; fi
  if ! is_installed "$root" "$group"; then
    if [ -n "$group" ]; then extras="[disk,hf,lightning,plots]"; fi
    python -m pip install -q --no-compile -e "$root$extras" -r <(tools_of "$root" "$group")
    installed_from "$root" >"$root/.venv/hetero-$group.installed"
  fi
}

tools_of() {  # pip reads groups from 25.1 on; this works with any
  python - "$1/pyproject.toml" "$2" <<'END'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    groups = tomllib.load(file)["dependency-groups"]
print("\n".join(groups.get(sys.argv[2], [])))
END
}

has_torch() {
  "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))' \
    2>/dev/null
}

# Whether this group was installed from these files as they are now, so that a second run is quick.
is_installed() {
  installed_from "$1" | cmp -s - "$1/.venv/hetero-$2.installed"
}

installed_from() {  # the kernel is compiled when hetero is installed
  cat "$1/pyproject.toml" "$1/hetero/csrc/update.c"
}
