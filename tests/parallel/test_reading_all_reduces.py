"""All-reduces in HLO text, synchronous and not, of one operand and of several."""

import pytest

from jaxattn.parallel.hlo_all_reduces import SCOPE, all_reduces

META = f'metadata={{op_name="jit(step)/{SCOPE}/psum" source_file="x.py"}}'


def one(line: str):
    [found] = all_reduces(f"  {line}\n  %add = f32[4]{{0}} add(%a, %b)\n")
    return found


def test_a_synchronous_one():
    found = one(f"%psum.1 = f32[8,64]{{1,0}} all-reduce(%x), channel_id=1, {META}")
    assert (found.name, found.operands, found.nbytes) == ("psum.1", 1, 2048)
    assert found.of_layers and found.serves and not found.config


def test_an_asynchronous_one_with_its_configuration():
    found = one(
        f"%s.2 = bf16[32,2048]{{1,0}} all-reduce-start(bf16[32,2048]{{1,0}} %y), {META}, "
        'backend_config={"collective_backend_config":{}}'
    )
    assert found.nbytes == 131072 and found.serves and "collective" in found.config


@pytest.mark.parametrize(
    "line",
    [
        "%a = (f32[8]{0}, f32[8]{0}) all-reduce(%x, %y), channel_id=1",
        "%a = f32[3]{0} all-reduce(%x), channel_id=1",
        "%a = s32[8]{0} all-reduce(%x), channel_id=1",
        "%a = f32[2000000]{0} all-reduce(%x), channel_id=1",
    ],
    ids=["two operands", "12 bytes", "integers", "8 MB"],
)
def test_what_the_kernel_does_not_take(line):
    assert not one(line).serves
