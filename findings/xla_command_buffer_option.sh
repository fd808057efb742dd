#!/usr/bin/env bash
# "+WHILE" adds a kind to XLA's CUDA graphs in XLA_FLAGS, and is an error among a jitted function's compiler options.
#
# Seen with jax 0.11.2, whose CPU build reads both. `xla_gpu_enable_command_buffer` lists the kinds of commands that XLA records in
# CUDA graphs. As a flag, "+WHILE" adds loops to XLA's own list of seven kinds. As an entry of `compiler_options`, "+WHILE" is
# "not a valid enum value", and "WHILE" takes the place of the list: products and fusions are then recorded no more, and
# nothing says so. A program that wants one more kind for one function has to name all kinds, and to follow XLA's list.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.11.2
cat >"$work/program.py" <<'PY'
import sys

import jax
import jax.numpy as jnp

options = {"xla_gpu_enable_command_buffer": sys.argv[1]} if len(sys.argv) > 1 else None
jax.jit(lambda x: jnp.sin(x) @ x, compiler_options=options)(jnp.ones((8, 8)))
PY
kinds() { # What a program of this folder was compiled with, as XLA writes it beside its dump.
    sed -n 's/^xla_gpu_enable_command_buffer: //p' "$work/$1/"*jit__lambda*.debug_options | sort -u | xargs
}
flag="--xla_gpu_enable_command_buffer=+WHILE"
export JAX_PLATFORMS=cpu
XLA_FLAGS="--xla_dump_to=$work/flag $flag" "$work/venv/bin/python" "$work/program.py"
XLA_FLAGS="--xla_dump_to=$work/option" "$work/venv/bin/python" "$work/program.py" WHILE
"$work/venv/bin/python" "$work/program.py" +WHILE >"$work/said" 2>&1 && exit 1
grep -q "'+WHILE' is not a valid enum value" "$work/said"
echo "flag +WHILE:     $(kinds flag)"
echo "option WHILE:    $(kinds option)"
echo "option +WHILE:   $(grep -o "'+WHILE' is not a valid enum value" "$work/said")"
test "$(kinds flag)" = "CONDITIONAL CUBLAS CUBLASLT CUDNN CUSTOM_CALL DYNAMIC_SLICE_FUSION FUSION WHILE"
test "$(kinds option)" = "WHILE"
