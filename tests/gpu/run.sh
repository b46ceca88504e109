#!/bin/bash
# Tries the nccl backend on real NVIDIA GPUs: a few minutes, one GPU is enough.
#
# THIS SCRIPT HAS NOT BEEN RUN ON A GPU, only in rehearsal; expect to correct it at its first run.
#
# Needs: a virtual environment that is active and has torch for CUDA (which brings NCCL), a C++20 compiler, Python's headers.
# Builds PolyCCL with the plugins nccl and, where the system has it, gloo, into a folder of its own. Where PolyCCL with nccl is
# installed already:
#   POLYCCL_GPU_INSTALLED=1 tests/gpu/run.sh
# Rehearsal without a GPU, on the stand-ins of tests/doubles and an installed PolyCCL: walks through the steps, says nothing of NCCL.
#   folder=$(python tests/doubles/build.py)
#   GPU_REHEARSAL=1 POLYCCL_CUDA_LIBRARY=$folder/cuda/libcuda.so.1 POLYCCL_NCCL_LIBRARY=$folder/cuda/libnccl.so.2 tests/gpu/run.sh
# Prints PASS, FAIL or SKIP for each step, and at the end one line of JSON. Exit status: 0 where no step failed.
# NCCL lets two ranks share a GPU from 2.30 on, as an experiment that may hang: each step has a deadline.
set -u
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} POLYCCL_SOCKET_IFNAME=${POLYCCL_SOCKET_IFNAME:-lo}
results=()
failed=0

note() {  # STATE NAME SECONDS DETAIL
  printf '%s %s (%s s)%s\n' "$1" "$2" "$3" "${4:+: $4}"
  results+=("$1"$'\t'"$2"$'\t'"$3"$'\t'"$4")
  [ "$1" != FAIL ] || failed=1
}

step() {  # NAME DEADLINE COMMAND...: run it, and note how it ended
  local name=$1 limit=$2 began=$SECONDS status=0 detail=""
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$work/log" 2>&1 || status=$?
  if [ "$status" -eq 0 ]; then
    detail=$(grep -o 'MB/s {.*}' "$work/log" | head -n 1)
    note PASS "$name" $((SECONDS - began)) "$detail"
  else
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || detail="no end within $limit s; "
    note FAIL "$name" $((SECONDS - began)) "${detail}status $status"
    tail -n 40 "$work/log" | sed 's/^/    /'
  fi
  return "$status"
}

skip() { note SKIP "$1" 0 "$2"; }

summary() {
  printf '%s\n' "${results[@]}" | "$python" -c '
import json, sys
rows = [line.rstrip("\n").split("\t") for line in sys.stdin]
steps = [dict(zip(("state", "step", "seconds", "detail"), row)) for row in rows]
gpu, nccl = sys.argv[1:]
print(json.dumps({"ok": all(s["state"] != "FAIL" for s in steps), "gpu": gpu, "nccl": nccl, "steps": steps}))' "$gpu" "$nccl"
  exit "$failed"
}

launch() {  # ISLANDS JOB: the command of a job
  "$python" -m polyccl launch --islands "$1" --timeout 60 -- "$python" tests/gpu/jobs.py "$2"
}
export -f launch
export python

gpu="" nccl=""
rehearsal=${GPU_REHEARSAL:-0}
if [ "$rehearsal" = 1 ]; then
  gpu="none: a rehearsal on stand-ins"
elif ! gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name(0))' 2>"$work/log"); then
  note FAIL "a GPU that torch sees" 0 "$(tail -n 1 "$work/log")"
  summary
fi

# 1. Build, and install into a folder of this run.
other=host
if [ -z "${POLYCCL_GPU_INSTALLED:-}" ] && [ "$rehearsal" != 1 ]; then
  backends=nccl
  [ ! -f /usr/include/gloo/config.h ] || backends=nccl,gloo
  step "build with $backends" 600 env POLYCCL_BUILD_BACKENDS="$backends" "$python" -m pip install --target "$work/site" . || summary
  export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
nccl=$("$python" -c '
import torch
from polyccl import report
[entry] = [each for each in report.collect()["backends"] if each["name"] == "nccl"]
assert entry["state"] == "loaded", entry
print(entry["library_version"])' 2>"$work/log") || { note FAIL "the nccl plugin loads" 0 "$(tail -n 1 "$work/log")"; summary; }
note PASS "the nccl plugin loads" 0 "$nccl"
! "$python" -c 'from polyccl import create; create.find_library("gloo")' 2>/dev/null || other=gloo

# 2. Real NCCL with one rank.
step "one rank: operations" 120 "$python" tests/gpu/jobs.py operations
step "one rank: order of streams" 120 "$python" tests/gpu/jobs.py stream_order
if [ "$rehearsal" = 1 ]; then
  skip "one rank: the host goes on" "needs a real kernel"
else
  step "one rank: the host goes on" 60 "$python" tests/gpu/jobs.py host_goes_on
fi

# 3. Real NCCL with two ranks: on two GPUs, or on one where the version can.
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
shares=$("$python" -c '
import re, sys
parts = [int(each) for each in re.findall(r"\d+", sys.argv[1])[:2]]
print(int(parts >= [2, 30]))' "$nccl")
if [ "$gpus" -ge 2 ] || [ "$shares" = 1 ]; then
  [ "$gpus" -ge 2 ] || export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4
  step "two ranks: operations" 180 bash -c 'launch nccl=2 operations'
  step "two ranks: order of streams" 120 bash -c 'launch nccl=2 stream_order'
  unset NCCL_MULTI_RANK_GPU_ENABLE NCCL_MAX_CTAS
else
  skip "two ranks" "one GPU, and NCCL $nccl lets no two ranks share it (2.30 and newer do)"
fi

# 4. A bridge: one rank on a GPU, two on the CPU.
step "bridge nccl=1,$other=2: doctor" 120 "$python" -m polyccl launch --islands "nccl=1,$other=2" -- "$python" -m polyccl doctor
step "bridge nccl=1,$other=2: operations" 180 bash -c "launch nccl=1,$other=2 operations"
step "bridge nccl=1,$other=2: order of streams" 180 bash -c "launch nccl=1,$other=2 stream_order"

# 5. How fast the staging path is.
step "bridge nccl=1,$other=1: bandwidth of the staging path" 180 bash -c "launch nccl=1,$other=1 staging"
summary
