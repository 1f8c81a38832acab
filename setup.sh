#!/usr/bin/env bash
# Sets up the trainer in an environment of its own (.venv in this folder) and starts it. You can run it repeatedly: it
# keeps existing parts and completes an interrupted set-up. `./setup.sh help` lists the commands.
set -Eeuo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
VENV="$ROOT/.venv"
PYTHONS="3.11, 3.12 or 3.13"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

usage() {
    cat <<'HELP'
./setup.sh                  install if needed, then open the page (http://127.0.0.1:7860)
./setup.sh gui [options]    open the page; --help lists the options
./setup.sh demo [options]   install if needed, then train a LoRA of a small model, and show what it learned
./setup.sh test [options]   install if needed, then run the tests; options go to pytest
./setup.sh test --quick     half of the tests, in about a minute: no whole model, no compiling, no browser
./setup.sh test --all       all tests: more families, sizes and ways of the slow ones
./setup.sh doctor           check this machine: GPU, PyTorch, packages, compiling
./setup.sh install          install or repair, and nothing else
./setup.sh update           bring program and packages up to date (end trainings and the page first); your files stay
./setup.sh help             this text

Environment variables:
  PYTHON=/path/to/python    which Python to use (3.11, 3.12 or 3.13)
  KOHYA_TORCH=cpu           which build of PyTorch: cpu, cu126 or cu130; without it, the GPU's driver decides
  KOHYA_INSTALLER=pip       install with pip; without it with uv, which is faster, set as pip is
HELP
}

say()  { printf '%s\n' "$*"; }
fail() { printf '\n%s\n' "$@" >&2; exit 1; }

venv_python() {
    if [ -x "$VENV/Scripts/python.exe" ]; then echo "$VENV/Scripts/python.exe"; else echo "$VENV/bin/python"; fi
}

# ---- which Python

version_of() {  # "3.11" for a Python that runs, nothing for one that does not
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

good_python() {
    # Why: docs/decisions/2026-11-20-no-setup-for-windows-shell.md
    case "$(version_of "$1")" in 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac
}

find_python() {
    local name seen=""
    if [ -n "${PYTHON:-}" ]; then
        good_python "$PYTHON" || fail "PYTHON is $PYTHON, which is not a Python $PYTHONS (it says: $(version_of "$PYTHON"))." \
            "Set PYTHON to another one, or unset it."
        echo "$PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.13 python3 python; do
        if good_python "$name"; then echo "$name"; return; fi
        [ -z "$(version_of "$name")" ] || seen="$seen $name is $(version_of "$name")."
    done
    fail "Python $PYTHONS is needed, and was not found.$seen" "Debian, Ubuntu: sudo apt-get install python3 python3-venv" \
        "Or install one from https://www.python.org and run: PYTHON=/path/to/python ./setup.sh"
}

make_venv() {  # an environment with pip and, where it can be had, uv
    local python
    if [ -d "$VENV" ] && ! good_python "$(venv_python)"; then
        say "The environment in $VENV has lost its Python; creating it again."
        rm -rf "$VENV"
    fi
    if [ -d "$VENV" ]; then
        say "Using the environment that is there: $VENV, Python $(version_of "$(venv_python)")"
    else
        python="$(find_python)"
        say "Making $VENV with $python, Python $(version_of "$python")"
        # ensurepip takes seconds; an existing pip is quicker, and installs uv as well.
        "$python" -m venv --without-pip "$VENV" 2>/dev/null &&
            (cd "$ROOT" && "$python" -m pip --python "$(venv_python)" install -q --require-hashes -r locks/build.txt) >/dev/null 2>&1 ||
            "$python" -m venv "$VENV" || { rm -rf "$VENV"; fail "Python could not make an environment." \
            "Debian, Ubuntu: sudo apt-get install python$(version_of "$python")-venv, then run this again."; }
    fi
    # An interruption of the lines above leaves an environment without pip, or with a partial one, which ensurepip
    # considers complete.
    "$(venv_python)" -m pip --version >/dev/null 2>&1 || {
        rm -rf "$("$(venv_python)" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/{pip,pip-*}
        "$(venv_python)" -m ensurepip --upgrade >/dev/null
    }
}

# ---- the packages: library/setup/installer.py, which is the same on every system

installer() { (cd "$ROOT" && PYTHONSAFEPATH='' "$(venv_python)" -m library.setup.installer "$@") || exit 1; }

refuse_unless_installed() {
    [ -d "$VENV" ] || fail "Nothing is installed yet. Run: ./setup.sh install"
    good_python "$(venv_python)" || fail "The environment in $VENV has lost its Python. Run: ./setup.sh install"
    installer need
}

install_once() {  # ensure, or again for the explicit command; then dev for the tools of the tests, too
    if [ ! -f "$VENV/installed.txt" ] || ! good_python "$(venv_python)"; then
        say; say "[1/4] Python and its environment"
        make_venv
    fi
    installer "$@"
}

# ---- the tests

find_chromium() {
    local name
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$name" >/dev/null 2>&1; then return 0; fi
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "Installing Chromium for the tests of the page."
        if { apt-get -q update && apt-get install -q -y --no-install-recommends chromium; } >/dev/null 2>&1; then return 0; fi
    fi
    say "No Chromium found: the tests that drive the page in a browser will be skipped."
}

run_tests() {
    # Two more than the cores: tests spend a fifth of their time waiting for browsers, files and other processes.
    local more=2 workers browser="" chosen=(-m "not exhaustive")
    # Otherwise each of many processes compiles PyTorch's sources on import; the checks of the set-up do it once.
    unset PYTHONDONTWRITEBYTECODE
    if [ "${1:-}" = --quick ]; then
        shift
        chosen=(-m "not slow and not browser and not gpu")
        more=0  # these tests wait for nothing, and each worker collects all
    else
        if [ "${1:-}" = --all ]; then shift; chosen=(); fi
        find_chromium &  # beside the packages: other servers, other files
        browser=$!
    fi
    install_once ensure dev
    [ -z "$browser" ] || wait "$browser"
    cd "$ROOT"
    export OMP_NUM_THREADS=1
    # Let glibc keep the memory of large tensors: requesting it from the kernel took a fifth of the trainings' time.
    export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=33554432
    if [ $# -gt 0 ] && [ -n "$browser" ]; then exec "$(venv_python)" -m pytest "$@"; fi
    workers="$("$(venv_python)" -c "import os; print(min(4, $more + (os.cpu_count() or 1)))")"
    exec "$(venv_python)" -m pytest -n "$workers" --dist worksteal --durations=20 ${chosen[@]+"${chosen[@]}"} "$@"
}

main() {
    local command="${1:-}"
    [ $# -eq 0 ] || shift
    case "$command" in
        "") install_once ensure; exec "$(venv_python)" -m kohya_gui ;;
        gui | doctor) refuse_unless_installed; exec "$(venv_python)" -m library.cli.main "$command" "$@" ;;
        demo) install_once ensure; exec "$(venv_python)" -m library.cli.main demo "$@" ;;
        test) run_tests "$@" ;;
        install) install_once again; say "./setup.sh gui opens the page." ;;
        update) [ -d "$VENV" ] || make_venv; installer update; exec "$ROOT/setup.sh" install ;;
        help | -h | --help) usage ;;
        *) usage >&2; fail "There is no command called $command." ;;
    esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; fi
