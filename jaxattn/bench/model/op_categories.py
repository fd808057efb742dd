"""The time of a step by category of op.

The name of one of our kernels determines its category. For an instruction that XLA generated, the
compiled step records the scopes and the functions of this package that it came from.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import jax

from jaxattn.aliasing.hlo import HloInstruction, HloModule
from jaxattn.bench.harness.timing import KernelLaunch, KernelTimes

KINDS = (
    "attention", "experts", "router", "dense products", "norms", "sampling", "copies", "other",
)  # fmt: skip
# The first match decides. Substrings of kernel names:
BY_KERNEL: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("mla_", "gdn_", "gqa_", "kda_", "flash", "attention")),
    ("router", ("moe_route", "topk", "top_k")),
    ("experts", ("moe_", "grouped", "ragged")),
    ("norms", ("rms_norm",)),
    ("dense products", ("linear",)),
    ("copies", ("memcpy", "memset", "copy", "dynamic_slice", "dynamic_update_slice")),
)
# Substrings of an instruction's scopes and functions:
BY_ORIGIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sampling", ("/sample/",)),
    ("router", ("top_k", " route ", "/router_logits/")),
    ("experts", ("mixture_of_experts", "ragged_dot")),
    ("attention", ("/mla_decode/", "/gqa_decode/", "_attention/", "_prefix/", "new_tokens/")),
    ("attention", ("causal_attention", "gated_delta")),
    ("norms", ("rms_norm", "RMSNorm")),
    ("dense products", ("absorb_", "dot_general", "linear_layer")),
    ("attention", ("mla_", "gqa_", "gdn_", "decode_schedule", "decode_rotation")),
)
MATMULS = ("gemm", "cutlass", "cublas", "nvjet", "xmma", "dot")
ROUTER = "MixtureOfExperts."  # methods that multiply by the router's matrix themselves


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCategory:
    """A row of the table, per call.

    Attributes:
        name: The category, one of `KINDS`.
        seconds: GPU time.
        launches: Kernel launches.
        nbytes: The bytes that the category has to move; 0 if they are not counted.
        kernels: The 8 most expensive kernels as (name, origin, seconds), longest first.
    """

    name: str
    seconds: float
    launches: float
    nbytes: int
    kernels: tuple[tuple[str, str, float], ...]


def by_kind(
    spent: Mapping[KernelLaunch, KernelTimes],
    compiled: jax.stages.Compiled,
    moved: Mapping[str, int],
) -> list[OpCategory]:
    """Returns the categories that took time, in the order of `KINDS`.

    Args:
        spent: The time of each launch.
        compiled: The compiled step.
        moved: The bytes that each category has to move.
    """
    origins = origins_of(compiled.as_text() or "")
    found: dict[str, list[tuple[str, str, KernelTimes]]] = {}
    for launch, each in spent.items():
        origin = origins.get(plain(launch.kernel)) or origins.get(plain(launch.op), "")
        found.setdefault(kind_of(launch.kernel, origin), []).append((launch.kernel, origin, each))
    return [_kind(name, found[name], moved.get(name, 0)) for name in KINDS if name in found]


def _kind(name: str, parts: Iterable[tuple[str, str, KernelTimes]], nbytes: int) -> OpCategory:
    longest = sorted(parts, key=lambda part: -part[2].seconds)
    return OpCategory(
        name=name,
        seconds=sum(each.seconds for *_, each in longest),
        launches=sum(each.launches for *_, each in longest),
        nbytes=nbytes,
        kernels=tuple((kernel, origin, each.seconds) for kernel, origin, each in longest[:8]),
    )


def kind_of(kernel: str, origin: str) -> str:
    """The category of a kernel, by its name and its instruction's origin ("" if unknown)."""
    for kind, words in BY_KERNEL:
        if any(word in kernel.lower() for word in words):
            return kind
    for kind, words in BY_ORIGIN:
        if kind == "dense products" and _innermost(origin).startswith(ROUTER):
            return "router" if "dot_general" in origin else "experts"
        if any(word in origin for word in words):
            return kind
    return "dense products" if any(word in kernel.lower() for word in MATMULS) else "other"


def _innermost(origin: str) -> str:
    """The innermost function that an instruction came from."""
    return origin.split(" ")[-2] if " " in origin.strip() else ""


def plain(name: str) -> str:
    """An instruction's name in the spelling of kernel names."""
    return re.sub(r"[.\-]", "_", name)


def origins_of(text: str) -> dict[str, str]:
    """Maps each kernel name to the origin of its instruction, "scopes functions ".

    Args:
        text: The text of an optimized HLO module. The functions are the call stack when the
            instruction was traced, outermost first.
    """
    functions, module = _functions(text), HloModule(text)

    def own(instruction: HloInstruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        called = functions.get(frame[1], ()) if frame else ()
        return f"{instruction.op_name} {' '.join(called)} " if instruction.op_name else ""

    def within(instruction: HloInstruction) -> str:
        """The origin of a fusion without its own, such as a product with a slice of a stack."""
        inner = [
            i for name in instruction.called for i in module.computations.get(name, {}).values()
        ]
        products = [each for each in inner if each.opcode in ("custom-call", "dot")]
        return next(filter(None, map(own, [*products, *reversed(inner)])), "")

    every = (i for instructions in module.computations.values() for i in instructions.values())
    found = ((plain(i.name), own(i) or within(i)) for i in every)
    return {name: origin for name, origin in found if origin}


def _functions(text: str) -> dict[str, tuple[str, ...]]:
    """The call stack of each stack frame, outermost first, from the tables before the module."""
    tables: dict[str, dict[str, str]] = {}
    entries: dict[str, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            entries = tables.setdefault(line, {})
        elif row := re.match(r"(\d+) (.*)", line):
            entries[row[1]] = row[2]
        elif line.startswith(("ENTRY", "%")):
            break
    frames = tables.get("StackFrames", {})
    parents = {frame: _number(entry, "parent_frame_id") for frame, entry in frames.items()}
    # If some frame is listed as its own parent, ids are shifted: 1 means no parent, n frame n - 1.
    shift = any(frame == parent for frame, parent in parents.items())
    found: dict[str, tuple[str, ...]] = {}
    for frame, entry in frames.items():
        location = tables["FileLocations"].get(_number(entry, "file_location_id"), "")
        function = tables["FunctionNames"].get(_number(location, "function_name_id"), "")
        parent = str(int(parents[frame] or 0) - shift)
        found[frame] = (*found.get(parent, ()), function.strip('"'))
    return found


def _number(entry: str, field: str) -> str:
    found = re.search(rf"{field}=(\d+)", entry)
    return found[1] if found else ""
