#!/usr/bin/env bash
# Debian's Chromium for the tests of the error pages, where it can be had: as root, with apt. They skip without it.
set -euo pipefail

if [[ -x /usr/bin/chromium ]]; then
    /usr/bin/chromium --version
elif [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "no /usr/bin/chromium, and no right to install it: the tests in a browser will skip"
else
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update >"$log" 2>&1 && apt-get install -y --no-install-recommends chromium fonts-dejavu-core >>"$log" 2>&1; then
        /usr/bin/chromium --version
    else
        tail -n 3 "$log"
        echo "chromium could not be installed: the tests in a browser will skip"
    fi
    rm -f "$log"
fi
