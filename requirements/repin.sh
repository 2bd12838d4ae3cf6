#!/usr/bin/env bash
# Writes requirements/cpu.txt anew from pyproject.toml: the versions that ./setup.sh falls back to without uv.
# Needs the environment of ./setup.sh (for its uv). No index, host or local path gets into the file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
find_links=()
for place in ${PIP_FIND_LINKS:-}; do find_links+=(--find-links "$place"); done

{
    echo "# Written by requirements/repin.sh; do not edit. Everything a run and the tests need on a CPU, for"
    echo "#   pip install --no-deps -r requirements/cpu.txt && pip install torch==2.13.0"
    echo "# The second command adds what torch itself needs where only its CUDA build is found. One set of versions serves"
    echo "# Python 3.11 to 3.13. The torch line names no build: pip takes the CPU build where it sees one."
    .venv/bin/uv pip compile --quiet --no-header --no-annotate --upgrade --python-version 3.11 \
        --extra cpu --extra test --extra tasks "${find_links[@]}" \
        --overrides requirements/cpu-overrides.txt --overrides requirements/cpu-overrides-any-torch.txt pyproject.toml |
        grep -vE '^(nvidia-|cuda-)' |
        sed -E -e 's/^(torch==[^+]*)\+.*/\1/' -e 's/^(intel-.*)/\1 ; platform_machine == "x86_64"/'
} >requirements/cpu.txt.new
mv requirements/cpu.txt.new requirements/cpu.txt
