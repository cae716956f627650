# To be sourced by the other scripts, with $root: lets CMake's compilers use ccache, if .venv has it. Kernels that were
# compiled before, in this or another checkout, are taken from the cache.
if [ -x "$root/.venv/bin/ccache" ]; then
    export CMAKE_CXX_COMPILER_LAUNCHER="$root/.venv/bin/ccache" CMAKE_CUDA_COMPILER_LAUNCHER="$root/.venv/bin/ccache"
    export CCACHE_DIR="${GRACE_CACHE:-${XDG_CACHE_HOME:-${HOME:-$root}/.cache}/grace}/ccache" CCACHE_MAXSIZE=1G
    # Relative paths are the same in every checkout.
    export CCACHE_BASEDIR=/ CCACHE_NOHASHDIR=1
fi
