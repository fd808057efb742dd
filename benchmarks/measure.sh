#!/bin/bash
# What the docs say of one GPU, measured again: one topic, its results as JSON files in OUT.
#
#     bash benchmarks/measure.sh TOPIC OUT
#
#     suite     GPU tests by room, then those that want the whole GPU       20 minutes
#     host      what the engine's host adds to a step; start; first token   12
#     models    whole models, loading, plans beside the allocator's peak    25
#     requests  whole requests and servers, also vLLM's where it is installed
#     rollout   updates of weights, scores and exact mode                   10
#     gqa       grouped-query attention, with FlashAttention-3 and vLLM's kernels where they are installed
#     mla       MLA decode and prefill, FP8 caches, with the same peers     10
#     delta     gated delta rule and Kimi Delta Attention                   10
#     cuda12    the kernels' tests with the ptxas that is first on PATH     10
#
# Run it in the root of the repository, on a machine with one Hopper GPU (a model of 80 GB wants 141 GB). Each
# program has a limit of time, so that one that hangs does not take the rest with it.
set -u
TOPIC=${1:?a topic: suite, host, models, requests, rollout, gqa, mla, delta or cuda12}
OUT=${2:-results}
mkdir -p "$OUT"
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1

run() {  # SECONDS, a command
  echo "== $(date +%T) ${*:2}"
  timeout -k 5 "$@" || echo "== exit $?: ${*:2}"
}
suite() { run 600 python -m pytest -q -m 'gpu and not large' -n 8 --dist loadgroup --timeout 200 "$@"; }
bench() { local name=$1; shift; run 300 python -m jaxattn.bench "$@" --json "$OUT/$name.json"; }
model() { local name=$1; shift; bench "model-${name,,}" model "$name" "$@"; }

case $TOPIC in
  suite)
    suite tests/kernels/mla tests/kernels/attention tests/ops/mla
    suite tests/kernels/gdn tests/ops/gdn tests/ops/kda
    suite tests/kernels/gqa tests/kernels/turboquant tests/ops/gqa tests/ops/turboquant
    suite tests/kernels/moe tests/kernels/linear tests/kernels/hopper tests/ops tests/nn tests/core tests/padding --ignore=tests/ops/mla \
      --ignore=tests/ops/gdn --ignore=tests/ops/kda --ignore=tests/ops/gqa --ignore=tests/ops/turboquant
    suite tests/engine tests/cli tests/bench tests/plan tests/server
    suite tests/models
    run 600 python -m pytest -q -m 'gpu and large'
    run 600 python -m scripts.sanitize
    ;;
  rollout)
    for measure in update score exact; do
      bench "rollout-deepseek-v2-lite-$measure" rollout DeepSeek-V2-Lite --measures "$measure"
    done
    bench rollout-qwen3.5-35b-a3b-score rollout Qwen3.5-35B-A3B --measures score
    ;;
  host)
    bench host-4 host --rows 4
    bench host-64 host --rows 64
    bench host-256 host --rows 256
    bench host-deepseek-v2-lite host deepseek-v2-lite --rows 32 --steps 300
    run 300 python -m scripts.time_start "$OUT/start.json" -- --max-model-len 4096
    ;;
  models)
    model Qwen3-Next-80B-A3B-FP8 --rows 1 32 128 --prompt 0
    model DeepSeek-V2-Lite --rows 1 32 128 --prompt 8192 --chunks 2048
    model GLM-4.7-Flash --rows 1 32 128 --prompt 8192 --chunks 2048
    model Qwen3.5-35B-A3B --rows 1 32 128 --prompt 0
    model Qwen3-32B --rows 1 --prompt 0
    model Kimi-Linear-48B-A3B --rows 1 32 128 --prompt 0
    run 120 python -m pytest -q -m gpu tests/models/test_loading_memory.py
    for name in Qwen3-Next-80B-A3B-FP8 GLM-4.7-Flash Qwen3.5-35B-A3B Qwen3-32B DeepSeek-V2-Lite; do
      run 140 python -m pytest -q -m gpu tests/plan/test_real_shapes_gpu.py -k "$name"
    done
    ;;
  requests)
    for name in DeepSeek-V2-Lite Qwen3.5-35B-A3B GLM-4.7-Flash Qwen3-32B Qwen3-Next-80B-A3B-FP8; do
      run 1800 python -m jaxattn.bench offline "$name" --mix fixed sharegpt --json "$OUT/offline-${name,,}.json"
      run 1800 python -m jaxattn.bench serve "$name" --json "$OUT/serve-${name,,}.json"
    done
    ;;
  gqa)
    bench gqa gqa --no-xla
    bench gqa-prefill gqa-prefill --no-xla
    bench gqa-turbo gqa --no-xla --only 64,32/8,128,8192:{k8v4,4bit_nc,k3v4_nc,3bit_nc}
    ;;
  mla)
    bench mla mla --all --no-xla
    bench mla-prefill mla-prefill --no-xla
    ;;
  delta)
    bench gdn gdn --all --no-xla
    bench kda kda --no-xla
    ;;
  cuda12)
    ptxas --version | tail -1
    suite tests/kernels tests/ops/test_norm.py tests/ops/kda tests/ops/mla/test_append.py
    ;;
  *)
    echo "no topic $TOPIC: suite, host, models, requests, gqa, mla, delta or cuda12" >&2
    exit 2
    ;;
esac
