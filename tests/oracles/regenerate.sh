#!/usr/bin/env bash
# Builds the oracle environments from PyPI and writes every golden again: `make golden`.
#
#   tests/oracles/regenerate.sh [OUT]     default OUT: tests/golden
#
# Environments and checkpoints go to the git-ignored folder oracles/. To use environments that
# exist already: ORACLE_NEMO_VENV and ORACLE_FTLLM_VENV (folders that hold bin/python).
# The unit references come from a wheel that is only unpacked.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-tests/golden}
work=oracles
python=${PYTHON:-python3}
nemo=${ORACLE_NEMO_VENV:-$work/venv-nemo}
ftllm=${ORACLE_FTLLM_VENV:-$work/venv-ftllm}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=. PYTHONWARNINGS=ignore
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
mkdir -p "$work" "$out"

# A half-built environment has no .ready and is built again.
if [ -z "${ORACLE_NEMO_VENV:-}" ] && [ ! -e "$nemo/.ready" ]; then
  rm -rf "$nemo"
  "$python" -m venv "$nemo"
  "$nemo/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 safetensors==0.8.0 \
    pillow tiktoken torchdata tilelang==0.1.15
  "$nemo/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
  touch "$nemo/.ready"
fi
if [ -z "${ORACLE_FTLLM_VENV:-}" ] && [ ! -e "$ftllm/.ready" ]; then
  rm -rf "$ftllm"
  "$python" -m venv "$ftllm"
  "$ftllm/bin/pip" install --quiet ftllm==1.9.0 safetensors==0.8.0
  touch "$ftllm/.ready"
fi
if [ ! -d "$work/tilekernels" ]; then
  "$nemo/bin/pip" download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    -d "$work/wheels" tile-kernels==2.1.0
  "$nemo/bin/python" -m zipfile -e "$work"/wheels/tile_kernels-*.whl "$work/tilekernels"
fi

"$nemo/bin/python" -m tests.oracles.tilekernels --package "$work/tilekernels" --out "$out"
# ftllm leaves files of its own in a checkpoint folder, and the writer refuses such folders.
rm -rf "$work/checkpoints"
"$nemo/bin/python" -m tests.oracles.checkpoint --out "$work/checkpoints"
"$nemo/bin/python" -m tests.oracles.nemo --checkpoints "$work/checkpoints" --out "$out"

# The engine prints every loaded tensor: to a log.
second_engine() {  # run, export, checkpoint
  echo "ftllm: $1 $2"
  "$ftllm/bin/python" -m tests.oracles.ftllm_peer --run "$1" --export "$2" \
    --checkpoint "$work/checkpoints/$3" --golden "$out" --out "$out" \
    > "$work/ftllm-$1-$2.log" 2>&1 || { tail -n 20 "$work/ftllm-$1-$2.log"; exit 1; }
}
for suffix in "" -rounded; do
  second_engine "peer-noflip$suffix" bf16 peer-noflip
  second_engine "peer-noflip-fp8$suffix" bf16 peer-noflip-fp8-as-bf16
  second_engine "peer-noflip-fp8$suffix" fp8 peer-noflip-fp8
  second_engine "mini$suffix" bf16 mini-fp8-as-bf16
  second_engine "mini$suffix" fp8 mini-fp8
done
