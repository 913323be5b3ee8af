#!/usr/bin/env bash
# Make the virtual environment with everything in it; bring Debian's redis-server where apt and root are there (the tests
# run against it too, the product itself carries a server in a wheel).
set -euo pipefail
python="${PYTHON:-python3}" venv="${VENV:-.venv}"

"$python" - <<'CHECK'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Everstep needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")
CHECK

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[server,worker,dev]'

if ! command -v redis-server >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; } >/dev/null 2>&1 ||
    echo "redis-server is not to be had from apt; the bundled one serves" >&2
fi
