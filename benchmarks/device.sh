#!/usr/bin/env bash
# Measure and check training on one device (CUDA or NPU), in at most eight minutes; prints one Markdown table:
#   benchmarks/device.sh                      the table also goes to $OUT/device.md, or to device-results/ without OUT
#   benchmarks/device.sh --wheels FOLDER      libraries that the machine lacks come from a folder of wheels
#   benchmarks/device.sh --make-wheels FOLDER downloads these, where there is a network
#   benchmarks/device.sh --smallest           every part at its smallest, also on a host without a device
# PYTHON names the Python to use; else it is the active environment's, or the checkout's own.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for python in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$here/../.venv/bin/python" python3 python; do
    if [ -n "$python" ] && "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
        exec "$python" -W ignore "$here/device.py" "$@"
    fi
done
echo "benchmarks/device.sh: no Python with torch was found; name one: PYTHON=/path/to/python bash $0" >&2
exit 2
