#!/usr/bin/env bash
# Makes the development environment, or brings it up to date: tools/venv.sh [FOLDER], by default .venv.
# PYTHON chooses the interpreter. Nothing is installed while the pins stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=${PYTHON:-python3}

say() { printf 'sparse-mla: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

command -v "$python" >/dev/null || fail "no '$python' here: install Python 3.10 or newer (apt-get install python3 python3-venv), or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "Python 3.10 or newer is needed, and $python is $("$python" -V 2>&1): set PYTHON=python3.11, say"

# A torch of the caller's own interpreter, if it is one that we support: several GB that need no second copy.
own_torch() {
    "$python" - <<'PY' 2>/dev/null
import re, sys
import torch
sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 9))
PY
}

# A .pth file rather than --system-site-packages, which would miss an interpreter that is itself in an environment.
# What the new environment holds itself comes first.
borrow_packages() {
    "$python" - >"$borrowed" <<'PY'
import sys
print("\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))
PY
}

pins=$(cat requirements/*.txt tools/venv.sh | cksum)
project=$(cat pyproject.toml sparse_mla/version.py | cksum)
stamp=$venv/.installed
# The interpreter's path is part of it: an environment that was moved or whose Python went away is made anew.
wanted="$PWD/$venv|$pins|$project"
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "this Python cannot make environments: run 'apt-get install python3-venv' (Debian, Ubuntu), then the same command again"
    say "making $venv with $("$python" -V 2>&1)"
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
borrowed=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth
rm -f "$borrowed" # pip must not take a borrowed package for an installed one: its command would be missing

say "installing the pinned development packages"
pip install -r requirements/dev.txt
pip install --no-deps --no-build-isolation --editable .
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if own_torch; then
        say "using the torch that $python has already"
        borrow_packages
    else
        say "installing torch (once; a few minutes)"
        pip install -r requirements/torch.txt
    fi
fi
printf '%s\n' "$wanted" >"$stamp"
