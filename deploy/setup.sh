#!/usr/bin/env bash
# Make the virtual environment with everything in it. Where apt and root are there, bring what tests use besides: Debian's
# redis-server (the product itself carries one in a wheel), iproute2 and iptables (hosts as network namespaces), and a browser.
# EVERSTEP_SKIP_DASHBOARD=1 leaves the dashboard out, and with it everything from npm.
set -euo pipefail
python="${PYTHON:-python3}" venv="${VENV:-.venv}"

"$python" - <<'CHECK'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Everstep needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")
CHECK

debian_packages() {
  declare -A packages=([redis-server]=redis-server [ip]=iproute2 [iptables]=iptables [chromium]=chromium)
  missing=()
  for tool in "${!packages[@]}"; do
    command -v "$tool" >/dev/null || missing+=("${packages[$tool]}")
  done
  if [ "${#missing[@]}" -gt 0 ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 ||
      echo "${missing[*]} not to be had from apt; tests that need them are skipped, and the bundled Redis serves" >&2
  fi
}

debian_packages &  # meanwhile, for a minute
debian=$!

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[server,worker,dev]'

if [ "${EVERSTEP_SKIP_DASHBOARD:-0}" != 1 ]; then
  # The package's build has its own; this is what checks types, and what looks at pages for people who do not see them.
  PATH="$(cd "$venv/bin" && pwd):$PATH" npm --prefix api/web ci --ignore-scripts --no-audit --no-fund --prefer-offline --silent
fi

wait "$debian"

# Checks the alert rules. Only the tool: the package would start a server.
if ! command -v promtool >/dev/null && [ ! -x "$venv/bin/promtool" ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  unpacked="$(mktemp -d)" tools="$(cd "$venv/bin" && pwd)"
  (cd "$unpacked" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } &&
    dpkg -x prometheus_*.deb . && cp usr/bin/promtool "$tools/") >/dev/null 2>&1 ||
    echo "promtool is not to be had from apt; the test that needs it is skipped" >&2
  rm -rf "$unpacked"
fi
