#!/bin/bash
# One part of what only a GPU can show, within ten minutes, with a limit on every step and results as they come:
#     OUT=DIR bash tests/gpu/session.sh gate|cost|progress|loop|sharing|papers [--simulated]
# README.md beside this says what each part shows, and how the wheels in .gpu-wheels come about. --simulated runs the
# same scripts without a GPU and with less of everything.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
part=${1:?gate, cost, progress, loop, sharing or papers}
simulated=${2:-}
OUT=${OUT:-.}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PATH="$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin"
site=
if [ -z "$simulated" ] && compgen -G '.gpu-wheels/*.whl' >/dev/null; then
    site=/tmp/gpushare-site
    [ -d "$site" ] || timeout 120 python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" .gpu-wheels/*.whl || exit 1
    # As in the image: what compiles at its start keeps the memory that this took (docs/adr/0101).
    python3 -m compileall -q -j 0 "$site"
fi
export PYTHONPATH="$PWD:$PWD/src:$PWD/operator:$PWD/deviceplugin${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
status=0

step() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    echo "== $name (at most $seconds s)"
    timeout -k 20 "$seconds" "$@"
    local code=$?
    [ "$code" = 0 ] || { status=1 && echo "== $name: exit status $code"; }
}

contracts="tests/mps/test_control_contract.py tests/mps/test_memory.py tests/devices/test_contract.py"
case "$part${simulated:+ simulated}" in
"gate")
    # shellcheck disable=SC2086
    step contracts 120 python3 -m pytest -q -p no:cacheprovider -m gpu $contracts > >(tee "$OUT/contracts.txt") 2>&1
    step gate_suite 440 python3 tests/gpu/gate_suite.py --agent --faults 50 --out "$OUT"
    ;;
"gate simulated")
    # shellcheck disable=SC2086
    step contracts 120 python3 -m pytest -q -p no:cacheprovider -m "not gpu" $contracts > >(tee "$OUT/contracts.txt") 2>&1
    step gate_suite 560 python3 tests/gpu/gate_suite.py --twin --agent --faults 10 --out "$OUT"
    ;;
"cost") step agent_suite 575 python3 tests/gpu/agent_suite.py --out "$OUT" --only profiles counters agent ;;
"cost simulated")
    step agent_suite 120 python3 tests/gpu/agent_suite.py --out "$OUT" --only agent --minutes 0.5 --simulated
    ;;
"progress") step progress 575 python3 tests/gpu/agent_suite.py --out "$OUT" --only progress ;;
"progress simulated")
    step progress 300 python3 tests/gpu/agent_suite.py --out "$OUT" --only progress --sets 2=2 3=2 4=2 --simulated
    ;;
"loop") step loop 575 python3 tests/gpu/loop_suite.py --out "$OUT" ;;
"loop simulated") step loop 300 python3 tests/gpu/loop_suite.py --out "$OUT" --seconds 30 --simulated ;;
"sharing" | "sharing simulated") # goes on with what .sharing holds of earlier sessions
    mkdir -p "$OUT/sharing"
    cp .sharing/sharing.jsonl "$OUT/sharing/" 2>/dev/null
    step sharing "${LIMIT:-575}" python3 -m bench sharing run "$OUT/sharing" --without-kubernetes \
        ${simulated:+--simulated} --budget "${MINUTES:-8}" ${SHARING_OPTIONS:-}
    step report 60 python3 -m bench sharing report "$OUT/sharing"
    ;;
"papers" | "papers simulated") # goes on with what .papers holds of earlier sessions
    work=$(mktemp -d)
    mkdir -p "$work/papers"
    [ ! -f .papers/papers.tar.gz ] || tar -xzf .papers/papers.tar.gz -C "$work"
    # shellcheck disable=SC2086
    step papers "${LIMIT:-560}" python3 -m bench papers run "$work/papers" ${simulated:+--simulated} \
        --budget "${MINUTES:-9}" ${PAPERS_OPTIONS:-}
    tar -czf "$OUT/papers.tar.gz" -C "$work" papers # one file of ten: few come back from a lent machine
    step report 30 python3 -m bench papers report "$work/papers"
    cp "$work"/papers/papers.md "$work"/papers/papers.png "$OUT/" 2>/dev/null
    rm -rf "$work"
    ;;
*)
    echo "no part $part: gate, cost, progress, loop, sharing or papers" >&2
    exit 2
    ;;
esac
python3 tests/gpu/summary.py "$OUT" >"$OUT/summary.md"
exit "$status"
