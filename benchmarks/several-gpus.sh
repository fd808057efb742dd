#!/bin/bash
# Several GPUs beside one: tests, then decode steps. Results are JSON files in OUT, one for each model.
#
#     bash benchmarks/several-gpus.sh 2 OUT       two GPUs, 15 to 20 minutes
#     bash benchmarks/several-gpus.sh 4 OUT       four
#     bash benchmarks/several-gpus.sh 8 OUT       eight, of 141 GB: DeepSeek-R1 too
#
# Run it in the root of the repository. The first rows are worth the most. A model or a number of rows that a GPU has no room
# for is left out, and said so.
set -u
GPUS=${1:?2, 4 or 8 GPUs}
OUT=${2:-results}
mkdir -p "$OUT"
# XLA's own choice of what a CUDA graph records, and collectives.
GRAPHS=xla_gpu_enable_command_buffer=CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES

bench() {  # NAME, and flags of `bench parallel`
  local name=$1
  shift
  echo "== $name $*"
  timeout -k 5 600 python -m jaxattn.bench parallel "$name" "$@" --one-launch --xla-options $GRAPHS --json "$OUT/$GPUS-${name,,}-$((++FILES)).json"
}
FILES=0

timeout -k 5 600 python -m pytest -m gpu -p no:xdist -s -v tests/parallel

case $GPUS in
  2)
    bench DeepSeek-V2-Lite --rows 1 32 128 --tensor 2 --also data=2,expert=2
    bench Qwen3.5-35B-A3B --rows 1 32 128 --tensor 2
    bench DeepSeek-V2-Lite --rows 32 --tokens 32768 --tensor 2 --context 2
    bench DeepSeek-V2-Lite --rows 128 --tokens 32768 --data 2 --expert 2
    bench Kimi-Linear-48B-A3B --rows 32 128 --tensor 2
    bench Qwen3-Next-80B-A3B --rows 1 32 128 --tensor 2 --not-alone # 2 x 141 GB
    ;;
  4)
    bench DeepSeek-V2-Lite --rows 1 32 128 --tensor 4 --also data=2,tensor=2,expert=4 data=4,expert=4
    bench Qwen3.5-35B-A3B --rows 1 32 128 --tensor 4
    bench Qwen3-Next-80B-A3B --rows 1 32 128 --tensor 4 --not-alone
    bench DeepSeek-V2-Lite --rows 32 --tokens 32768 --tensor 4 --context 4
    bench DeepSeek-V2-Lite --rows 256 --tokens 32768 --data 4 --expert 4 --not-alone
    bench Kimi-Linear-48B-A3B --rows 32 128 --tensor 4
    ;;
  8)
    bench DeepSeek-R1 --rows 8 64 256 --data 8 --expert 8 --not-alone
    bench DeepSeek-R1 --rows 1 32 --tensor 8 --context 8 --expert 8 --also data=2,tensor=4,context=4,expert=8 --not-alone
    bench DeepSeek-V2-Lite --rows 128 --tensor 8 --also data=8,expert=8
    bench Qwen3.5-35B-A3B --rows 1 32 128 --tensor 8
    bench Qwen3-Next-80B-A3B --rows 1 32 128 --tensor 8 --not-alone
    bench DeepSeek-V2-Lite --rows 32 --tokens 32768 --tensor 8 --context 8
    ;;
  *)
    echo "2, 4 or 8 GPUs; got $GPUS" >&2
    exit 2
    ;;
esac
