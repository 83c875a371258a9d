#!/usr/bin/env bash
# Fuse two checkpoints, and pass the result on only if it is worth it: merge, gate on what transport
# cost, evaluate, upload. Any step that says no ends the run with its exit code, before the upload.
#
#     examples/ci/pipeline.sh A B FOLDER
#
# FOLDER gets fused.safetensors, its report, costs.html and scores.txt. Set by the environment:
#   ARCH       the network (net.py:make_net, hf:DIR, ...): the merge has to be proven on it
#   MAX_COST   largest OT cost of a space (docs/report.md); default 1.3, random maps cost about 1.4
#   MAX_MOVED  largest fraction of a space's units that may move: for fine-tunes of one start
#   EVALUATE   command that gets the fused checkpoint, prints scores, and fails if they are poor
#   UPLOAD     command that gets FOLDER
set -euo pipefail

if [ $# -ne 3 ]; then
    echo "usage: $0 A B FOLDER" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
a=$1 b=$2 folder=$3
fused=$folder/fused.safetensors
proof=()
if [ -n "${ARCH:-}" ]; then
    proof=(--arch "$ARCH" --require-proof)
fi
gates=(--max-cost "${MAX_COST:-1.3}")
if [ -n "${MAX_MOVED:-}" ]; then
    gates+=(--max-moved "$MAX_MOVED")
fi

step() { echo "== $*" >&2; }

mkdir -p "$folder"

step "do $a and $b fit together?"
otfuse inspect "$a" "$b" --quiet

step "merge"
if [ -z "${ARCH:-}" ]; then
    echo "ARCH names no network: the layer graph is assumed from names and shapes" >&2
fi
otfuse merge "$a" "$b" -o "$fused" "${proof[@]}" --overwrite --quiet

step "gate: ${gates[*]}"
otfuse inspect "$fused" "${gates[@]}" --plot "$folder/costs.html" --overwrite --quiet

step "evaluate"
${EVALUATE:-python "$here/evaluate_digits.py"} "$fused" | tee "$folder/scores.txt"

step "upload"
${UPLOAD:-echo "nothing to upload with; the result is in"} "$folder"
