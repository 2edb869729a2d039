# Sourced by .ci/run: `setup_chromium [SECONDS]` installs the Chromium in which tests look at pages,
# where none is there and this machine lets us. It says nothing, ends in time, and never fails: where
# it cannot, those tests are skipped, as they are on a developer's machine without one.

setup_chromium() {
  if has_chromium || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return 0; fi
  timeout --kill-after=5 "${1:-120}" bash -c '
    export DEBIAN_FRONTEND=noninteractive
    apt-get update && apt-get install -y --no-install-recommends chromium' \
    </dev/null >/dev/null 2>&1 || true
}

has_chromium() {  # Ubuntu has a chromium-browser that only says how to install one
  local name
  for name in chromium chromium-browser chrome google-chrome; do
    if timeout 20 "$name" --version >/dev/null 2>&1; then return 0; fi
  done
  return 1
}
