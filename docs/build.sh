#!/usr/bin/env bash
# bash docs/build.sh: these pages as a site with search, in build/site. The pages are plain Markdown
# and need none of this. Zensical is pinned, in a venv of its own; it is no part of the gate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.0.73
venv=build/docs-venv
if [ "$("$venv/bin/zensical" --version 2>/dev/null | grep -o '[0-9.]*$')" != $version ]; then
  python3 -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -q "zensical==$version"
fi

# The site has the folders of the repository, so that every link leads where it leads there.
rm -rf build/pages build/site
mkdir -p build/pages
git ls-files -- '*.md' docs examples profiles LICENSE CITATION.cff hetero/report/assets/uplot/LICENSE |
  xargs cp --parents -t build/pages
cp docs/zensical.toml build/zensical.toml
"$venv/bin/zensical" build --clean --strict --config-file build/zensical.toml
