#!/bin/sh
# Usage: setup.sh VENV [EXTRA]
# Makes the environment VENV if need be and installs the project into it, editable, with the extras "cpu" and EXTRA.
# PYTHON names the interpreter (default python3).
set -eu

venv=$1
extra=${2:-}
python=${PYTHON:-python3}
here=$(dirname "$0")

fail() {
    echo "setup.sh: $1" >&2
    exit 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    command -v "$python" >/dev/null 2>&1 || fail "there is no $python; install Python 3.10 or newer, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old; set PYTHON to Python 3.10 or newer"
    # Debian splits venv off: there the module is found, yet cannot put pip into an environment.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$here/apt-install.sh" python3-venv ||
            fail "$python cannot make environments; as root: apt-get install python3-venv"
    fi
    # --clear: an environment that was left half made, or whose interpreter is gone, is no use.
    "$python" -m venv --clear "$venv" || fail "$python -m venv failed; on Debian: apt-get install python3-venv"
fi

echo "Installing cortiq-o1 into $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[cpu${extra:+,$extra}]"
