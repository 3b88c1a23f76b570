#!/usr/bin/env bash
# Writes the Python of the protos beside them: generate.sh [OUT], OUT being protos/ by default.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-.}
python=${PYTHON:-../.venv/bin/python}
PATH="$(dirname "$(realpath -s "$python")"):$PATH" "$python" -m grpc_tools.protoc -I . \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    sluice/v1/*.proto
