#!/bin/bash
# Several GPUs beside one: tests, then decode steps. Results are JSON files in OUT, one for each line below.
#
#     bash benchmarks/several-gpus.sh 2 OUT       two H200s, 15 to 20 minutes
#     bash benchmarks/several-gpus.sh 4 OUT       four H200s: Qwen3.5-397B in FP8 too
#     bash benchmarks/several-gpus.sh 8 OUT       eight H200s: DeepSeek-R1 and Kimi-K2 in FP8 too
#
# Run it in the root of the repository. The first rows are worth the most. A model or a number of rows that a GPU has no room
# for is left out, and said so. All rows of a machine size are taken in one go.
set -u
GPUS=${1:?2, 4 or 8 GPUs}
OUT=${2:-results}
mkdir -p "$OUT"

bench() {  # NAME, and flags of `bench parallel`
  local name=$1
  shift
  echo "== $name $*"
  timeout -k 5 600 python -m jaxattn.bench parallel "$name" "$@" --one-launch --json "$OUT/$GPUS-${name,,}-$((++FILES)).json"
}
FILES=0

timeout -k 5 600 python -m pytest -m gpu -p no:xdist -s -v tests/parallel

SUMS=$(seq -s ' ' 2 2 "$GPUS" | sed 's/ 6 / /') # 2, 4, 8
timeout -k 5 600 python -m jaxattn.bench long-row --tokens 1000000 --heads 32 128 --gpus 1 $SUMS --json "$OUT/$GPUS-long-row.json"
timeout -k 5 600 python -m jaxattn.bench collectives --gpus $SUMS --json "$OUT/$GPUS-collectives.json"
timeout -k 5 600 python -m jaxattn.bench collectives --gpus $SUMS --nccl --json "$OUT/$GPUS-collectives-nccl.json"

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
    # A quarter of DeepSeek-V2-Lite's experts is no multiple of 64 columns: whole experts.
    bench DeepSeek-V2-Lite --rows 1 32 128 --tensor 4 --expert 4 --also tensor=2 data=2,expert=2 data=4,expert=4
    bench Qwen3.5-35B-A3B --rows 1 32 128 --tensor 4 --also tensor=2
    bench Qwen3.5-397B-A17B-FP8 --rows 1 32 128 --tensor 4 --also data=4,expert=4 --not-alone
    bench Qwen3-Next-80B-A3B --rows 1 32 128 --tensor 4 --not-alone
    bench DeepSeek-V2-Lite --rows 32 --tokens 32768 --tensor 4 --context 4 --expert 4 --also tensor=2,context=2
    bench Qwen3.5-397B-A17B-FP8 --rows 1 32 --tokens 32768 --tensor 4 --also tensor=4,context=2 data=4,expert=4 --not-alone
    bench Qwen3-Next-80B-A3B --rows 1 32 128 --tokens 32768 --tensor 4 --not-alone
    bench DeepSeek-V2-Lite --rows 128 256 512 --data 4 --expert 4 --also data=2,expert=2
    bench Kimi-Linear-48B-A3B --rows 32 128 --tensor 4
    ;;
  8)
    bench DeepSeek-R1 --rows 1 32 128 --tensor 8 --also tensor=8,context=8 data=8,expert=8 --not-alone
    bench DeepSeek-R1 --rows 1 32 128 --tokens 32768 --tensor 8 --context 8 --also data=8,expert=8 --not-alone
    # Kimi-K2's weights are 134 GB on each GPU, and 148 GB with --data 8 --expert 8, which no H200 holds.
    bench Kimi-K2 --rows 1 8 32 --tensor 8 --context 8 --not-alone
    bench DeepSeek-V2-Lite --rows 1 32 128 --tensor 8 --expert 8 --also data=2,expert=2 data=4,expert=4 data=8,expert=8
    bench DeepSeek-V2-Lite --rows 256 512 1024 --data 8 --expert 8 --also data=2,expert=2 data=4,expert=4
    bench Qwen3.5-35B-A3B --rows 1 32 128 --tensor 8 --also tensor=2 tensor=4
    bench Qwen3.5-397B-A17B-FP8 --rows 1 32 128 --tensor 8 --also data=8,expert=8 --not-alone
    bench Qwen3-Next-80B-A3B --rows 1 32 128 --tensor 8 --not-alone
    bench DeepSeek-V2-Lite --rows 32 --tokens 32768 --tensor 8 --context 8 --expert 8 --also tensor=2,context=2 tensor=4,context=4,expert=4
    ;;
  *)
    echo "2, 4 or 8 GPUs; got $GPUS" >&2
    exit 2
    ;;
esac
