#!/bin/sh
# Checks and measures the Triton back end on a machine with a CUDA device: one command, at most
# eight minutes, no network, nothing is built or installed. Needs a python3 with a CUDA torch.
#
#   benchmarks/device.sh          on the device; results go to benchmarks/results/device-<time>.json
#   benchmarks/device.sh --dry    anywhere: tiny shapes in Triton's interpreter, to see that it starts
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-benchmarks/results}
STAMP=$(date -u +%Y-%m-%dT%H%M)
export PYTHONPATH=. PYTHONUNBUFFERED=1

if [ "${1:-}" = --dry ]; then
    TRITON_INTERPRET=1 exec "$PYTHON" -m benchmarks.device --dry
fi

status=0
timeout 330 "$PYTHON" -m benchmarks.device --json "$OUT/device-$STAMP.json" || status=$?
if command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer, memcheck over the checks"
    # Torch's own allocator hides small overruns from it.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 120 compute-sanitizer --tool memcheck \
        --error-exitcode 9 "$PYTHON" -m benchmarks.device --sections checks >"$OUT/sanitizer-$STAMP.txt" 2>&1
    sanitized=$?
    tail -3 "$OUT/sanitizer-$STAMP.txt"
    [ $sanitized -eq 124 ] && echo "it took too long and was stopped" && sanitized=0
    [ $status -eq 0 ] && status=$sanitized
fi
exit $status
