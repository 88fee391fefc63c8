#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command: scripts/gpu_check.sh [WHEELS] [--help]
#
# For a machine with one NVIDIA GPU and no network. WHEELS (wheels/) holds what
# scripts/gpu_wheels has fetched; Python ($PYTHON, or python3) has CuPy and NumPy.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$(readlink -f "$0")")/gpu_check.py" "$@"
