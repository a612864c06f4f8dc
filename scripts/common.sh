# Sourced by the scripts and by the examples' run scripts: which Python environment a command runs in.
# shellcheck shell=bash

MM_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The first Python that the tested set supports and that can make an environment. A name may exist and not run
# (a version manager's shim), so each is asked.
mm_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    echo "No Python 3.11 or newer with venv was found. Install one, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
    return 1
}

# What an installation depends on: the part of pyproject.toml before the tools' settings, and the tested set.
mm_install_stamp() {
    { sed '/^\[tool\./,$d' pyproject.toml; cat setup.py constraints.txt scripts/common.sh; } | cksum
}

# Make .venv with everything that the quick start, the tests and the checks need; at once done if it is up to date.
mm_make_venv() {
    (
        cd "$MM_ROOT" || exit 1
        stamp="$(mm_install_stamp)"
        if [ -x .venv/bin/python ] && [ "$(cat .venv/.installed 2>/dev/null)" = "$stamp" ]; then
            exit 0
        fi
        if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
            python="$(mm_find_python)" || exit 1
            echo "Making .venv with $("$python" --version) ..."
            "$python" -m venv .venv || exit 1
        fi
        echo "Installing into .venv (the first time takes minutes and some gigabytes: torch) ..."
        # torch and torchvision first and together: image processors fall back to other pixel values without torchvision.
        pins="$(grep -E '^(torch|torchvision)==' constraints.txt)"
        # shellcheck disable=SC2086
        .venv/bin/python -m pip install -q $pins -c constraints.txt || exit 1
        .venv/bin/python -m pip install -q -e ".[all,quickstart,test,dev]" -c constraints.txt || exit 1
        # for its own tests, without Triton, which not every machine has
        .venv/bin/python -m pip install -q --no-deps liger-kernel -c constraints.txt || exit 1
        # apart from the rest, for its own tests: where torchao can be found, transformers imports it at every start
        .venv/bin/python -m pip install -q --no-deps --upgrade --target .venv/torchao torchao -c constraints.txt || exit 1
        echo "$stamp" > .venv/.installed
    )
}

# For the tests: the trackers, which nothing else needs.
mm_add_trackers() {
    (
        cd "$MM_ROOT" || exit 1
        stamp="$(mm_install_stamp)"
        if [ "$(cat .venv/.trackers 2>/dev/null)" != "$stamp" ]; then
            .venv/bin/python -m pip install -q -e ".[trackers]" -c constraints.txt || exit 1
            echo "$stamp" > .venv/.trackers
        fi
    )
}

mm_activate_venv() {
    # shellcheck disable=SC1091
    source "$MM_ROOT/.venv/bin/activate"
}

# Start the processes of a run as `mindspeed-mm train` does, with the package of this checkout. Arguments: a log file, to
# which the lines go too unless they are on a terminal, where one line is renewed; then those of `mindspeed-mm train`.
mm_start() {
    local log="$1"
    shift
    if [ -t 1 ]; then
        python -m mindspeed_mm.tools.cli train "$@"
    else
        python -m mindspeed_mm.tools.cli train "$@" 2>&1 | tee -a "$log"
    fi
}

# For run scripts of examples: the environment that is active, else the checkout's .venv (made if it is absent).
# Arguments: modules that the example needs beside the framework's own.
mm_use_environment() {
    local active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
    if [ -z "$active" ]; then
        mm_make_venv && mm_activate_venv
        return
    fi
    local missing
    missing="$(python -c '
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])' torch transformers pydantic "$@")" || return 1
    if [ -n "$missing" ]; then
        echo "The active environment ($active) lacks: $missing." >&2
        echo "Install there:  pip install -e '$MM_ROOT[all,quickstart]' -c '$MM_ROOT/constraints.txt'" >&2
        echo "or deactivate it, and this checkout's own .venv is used." >&2
        return 1
    fi
}
