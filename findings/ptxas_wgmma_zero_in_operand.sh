#!/usr/bin/env bash
# If one register of an operand that several wgmmas share is the constant 0, ptxas keeps the operand once for each.
#
# Seen with ptxas 13.0.88 and 13.2.51 for sm_90a, and no more with 13.5.37. A left operand in registers has four of
# them a thread. Four products of one computed operand read the same four, and so they do if one of these is the
# constant 0x3f803f80, a pair of bfloat16 ones. If it is 0, as in a triangular mask, each product has four registers of
# its own: the computed words are copied three times, and the kernel uses 58 registers instead of 46. ptxas knows the
# result of a shuffle of 0, leaves the shuffle out, and copies as before.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
for package in nvcc==13.0.88 nvcc==13.2.51 nvcc==13.5.37 nvdisasm==13.5.37; do
    "$work/venv/bin/pip" install -q --no-deps --target "$work/$package" "nvidia-cuda-$package"
done
cat >"$work/look.py" <<'PY'
import pathlib
import re
import subprocess
import sys

work = pathlib.Path(sys.argv[1])
PRODUCTS = 4
LAST = {
    "computed": "add.u32 %a3, %a0, %a1;",
    "ones": "mov.b32 %a3, 0x3f803f80;",
    "zero": "mov.b32 %a3, 0;",
    "shuffled zero": "mov.b32 %s, 0; shfl.sync.bfly.b32 %a3, %s, 1, 0x1f, -1;",
}


def program(last):
    lines = [
        ".version 8.7",
        ".target sm_90a",
        ".address_size 64",
        ".extern .shared .align 1024 .b8 tile[];",
        ".visible .entry products(.param .u64 out, .param .u64 form, .param .u32 x) {",
        f".reg .f32 %sum<{4 * PRODUCTS}>; .reg .b32 %a<4>; .reg .b32 %s, %x, %thread, %tile;",
        ".reg .b64 %out, %offset, %right, %part;",
        "ld.param.u64 %out, [out]; ld.param.u64 %right, [form]; ld.param.u32 %x, [x];",
        "mov.u32 %thread, %tid.x;",
        f"mul.wide.u32 %offset, %thread, {16 * PRODUCTS}; add.u64 %out, %out, %offset;",
        # The right operands, and the descriptor of the first one.
        "mov.u32 %tile, tile; shl.b32 %s, %thread, 4; add.u32 %s, %tile, %s; st.shared.b32 [%s], %x;",
        "fence.proxy.async.shared::cta; bar.sync 0;",
        "and.b32 %tile, %tile, 0x3ffff; shr.u32 %tile, %tile, 4; cvt.u64.u32 %part, %tile;",
        "or.b64 %right, %right, %part;",
        "and.b32 %a0, %x, %thread; xor.b32 %a1, %x, %thread; not.b32 %a2, %a0;",
        last,
        *(f"mov.f32 %sum{i}, 0f00000000;" for i in range(4 * PRODUCTS)),
        "wgmma.fence.sync.aligned;",
    ]
    for product in range(PRODUCTS):
        sums = ", ".join(f"%sum{4 * product + i}" for i in range(4))
        lines += [
            f"add.u64 %part, %right, {16 * product};",
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
            f"{{{sums}}}, {{%a0, %a1, %a2, %a3}}, %part, 1, 1, 1, 0;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines += [f"st.global.f32 [%out + {4 * i}], %sum{i};" for i in range(4 * PRODUCTS)]
    return "\n".join([*lines, "ret;", "}", ""])


def output(package, name, *arguments):
    (path,) = (work / package).glob(f"**/bin/{name}")
    path.chmod(0o755)
    ran = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


for version in ("13.0.88", "13.2.51", "13.5.37"):
    operands, registers = {}, {}
    for name, last in LAST.items():
        (work / "x.ptx").write_text(program(last))
        said = output(f"nvcc=={version}", "ptxas", "-v", "-arch=sm_90a", work / "x.ptx", "-o", work / "x.cubin")
        code = output("nvdisasm==13.5.37", "nvdisasm", "-c", work / "x.cubin")
        found = re.findall(r"HGMMA\S* R\d+, (R\d+)", code)
        assert len(found) == PRODUCTS and "SHFL" not in code, code
        operands[name] = len(set(found))
        registers[name] = int(re.search(r"Used (\d+) registers", said)[1])
    print("ptxas", version, "operands:", operands, "registers:", registers)
    copied = () if version == "13.5.37" else ("zero", "shuffled zero")
    assert operands == {name: PRODUCTS if name in copied else 1 for name in LAST}, operands
    assert registers == {name: 58 if name in copied else 46 for name in LAST}, registers
PY
python3 "$work/look.py" "$work"
