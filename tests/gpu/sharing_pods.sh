#!/bin/bash
# The sharing benchmark with jobs as pods on a machine that ends every call after ten minutes: it runs on between calls.
#     bash tests/gpu/sharing_pods.sh warm                   # before `hack/gpu/cluster install`; no cluster is needed
#     OUT=DIR hack/gpu/cluster run -- bash tests/gpu/sharing_pods.sh start SECONDS    # begins it, for so long in all
#     OUT=DIR hack/gpu/cluster run -- bash tests/gpu/sharing_pods.sh wait SECONDS     # until it is over, or so long
# `start` goes on with DIR/sharing/sharing.jsonl where there is one, else with .sharing-pods/sharing.jsonl. `wait` leaves
# in DIR/sharing the records so far, the log and the report. SHARING_OPTIONS: of `python -m bench sharing run`.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
part=${1:?warm, start or wait}
seconds=${2:-0}
work=${GPUSHARE_SHARING:-/tmp/gpushare-sharing}
options=${SHARING_OPTIONS:---jobs 12 --least-seconds 18 --most-seconds 26 --repetitions 1 --policies gpushare hard-caps mps-equal time-slicing mps-pairs fifo}
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PATH="$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin"

case "$part" in
"warm") # what pods import and map from the host is compiled and in memory afterwards
    # shellcheck disable=SC2016
    look='import sys, time, os; t = time.monotonic(); import torch, torch._dynamo, numpy; n = [m.__name__ for m in list(sys.modules.values())
if isinstance(c := getattr(m, "__cached__", None), str) and not os.path.exists(c)]; print(f"import of PyTorch: {time.monotonic() - t:.1f} s, {len(n)} modules not compiled", *n[:3])'
    for _ in 1 2; do timeout 60 env -u PYTHONDONTWRITEBYTECODE python3 -c "$look"; done
    for program in wideresnet-app-bf16-b128 seq2seq-app-tf32-b96 lu-refine-fp32-4096; do # CUDA's libraries too
        {
            PYTHONPATH=$PWD:$PWD/src timeout 40 python3 -m bench.sharing.gpujob "$program" 1 | grep -q '"end"' ||
                echo "$program did not run here"
        } &
    done
    wait
    echo "warm after $SECONDS s"
    ;;
"start")
    : "${OUT:?}"
    if [ -f "$work/run.pid" ] && kill -0 "$(cat "$work/run.pid")" 2>/dev/null; then
        echo "it runs already: $work/run.log"
        exit 0
    fi
    rm -rf "$work"
    mkdir -p "$work/checkout" "$work/sharing"
    # The next call's checkout replaces this one while the benchmark runs.
    tar -c --exclude=./.gpu-bundle --exclude=./.git --exclude=./.gpu-wheels . | tar -x -C "$work/checkout"
    if compgen -G '.gpu-wheels/cachetools-*.whl' >/dev/null; then # all that the driver lacks there
        timeout 60 python3 -m pip install -q --no-index --no-deps --target "$work/site" .gpu-wheels/cachetools-*.whl || exit 1
    fi
    [ ! -f .gpu-wheels/COMMIT ] || { COMMIT=$(cat .gpu-wheels/COMMIT) && export COMMIT; } # git does not travel
    for earlier in "$OUT/sharing" .sharing-pods; do
        [ ! -f "$earlier/sharing.jsonl" ] || { cp "$earlier/sharing.jsonl" "$work/sharing/" && break; }
    done
    cat >"$work/run.sh" <<'RUN'
seconds=$1 work=$2 && shift 2
cd "$work/checkout" || exit 1
export PYTHONPATH="$PWD:$PWD/src:$PWD/operator:$PWD/deviceplugin:$work/site${PYTHONPATH:+:$PYTHONPATH}"
for try in 1 2 3 4; do # what failed is tried again while there is time
    left=$((seconds - SECONDS))
    [ "$left" -gt 60 ] || break
    echo "== call $try, $left s"
    tenths=$(((left - 15) / 6)) # of a minute
    timeout -k 20 "$left" python3 -m bench sharing run "$work/sharing" \
        --budget "$((tenths / 10)).$((tenths % 10))" --to-the-end "$@"
    code=$?
    echo "== exit status $code"
    [ "$code" = 0 ] || sleep 10
    [ "$(tail -n 2 "$work/run.log" | grep -c '\] complete$')" = 0 ] || break
done
touch "$work/over"
RUN
    # shellcheck disable=SC2086
    setsid bash "$work/run.sh" "$seconds" "$work" $options </dev/null >"$work/run.log" 2>&1 &
    echo $! >"$work/run.pid"
    echo "the benchmark has begun, for $seconds s: $work/run.log"
    ;;
"wait")
    : "${OUT:?}"
    until=$((SECONDS + seconds))
    while [ ! -e "$work/over" ] && [ "$SECONDS" -lt "$until" ]; do sleep 1; done
    mkdir -p "$OUT/sharing"
    cp "$work/sharing/sharing.jsonl" "$work/run.log" "$OUT/sharing/"
    tail -n 40 "$work/run.log"
    export PYTHONPATH="$PWD:$PWD/src:$PWD/operator:$PWD/deviceplugin:$work/site"
    timeout 40 python3 -m bench sharing report "$OUT/sharing" | cut -c 1-400
    [ -e "$work/over" ] && echo "it is over" || echo "it goes on"
    ;;
*)
    echo "no part $part: warm, start or wait" >&2
    exit 2
    ;;
esac
