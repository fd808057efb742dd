"""The weights on an engine's devices: the owners of their buffers, and updates in place.

    unchanged    parameters that `pack` does not change, which are most: the engine reads the
                 caller's array until an update gives the engine a buffer of its own
    computed     leaves that `pack` computes from small parameters; the engine owns them from the
                 beginning

An update copies each parameter into the engine's own buffer, which is donated to the copy. One
program packs the other parameters, with their earlier leaves donated too. With `share` the engine
reads the given arrays and copies none of them.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from jaxattn.engine.compilation.sharded_step import group_of
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.startup.placed_params import CheckedParams
from jaxattn.memory.plan import nbytes_each
from jaxattn.models.interface import Model, named_params, param_differences


@dataclasses.dataclass(frozen=True)
class ParamPlace:
    """One of the model's parameters, and its place among the steps' arguments.

    Attributes:
        path: The path in the tree of parameters.
        full_shape: The shape in a tree of the whole model.
        engine_shape: The shape over the engine's devices, with each GPU's share on its device.
        leaf: The index of the packed leaf that equals it; None if `pack` computes others from it.
        is_contiguous: Whether concatenating the GPUs' shares gives the whole model's parameter.
    """

    name: str
    path: Any
    full_shape: jax.ShapeDtypeStruct
    engine_shape: jax.ShapeDtypeStruct
    leaf: int | None
    is_contiguous: bool


class WeightPrograms:
    """The programs that copy and pack a model's parameters, compiled for its devices.

    Attributes:
        params: The place of each parameter, in the order of the tree.
        unchanged_params: The places of unchanged parameters, by the indices of their packed leaves.
        leaves: The packed leaves, as shapes with their shardings.
        computed_leaves: The indices of the non-empty leaves that `pack` computes.
        pack_inputs: The indices of the parameters from which it computes them.
    """

    def __init__(self, model: Model, devices: tuple[jax.Device, ...]):
        self.model, self.group = model, group_of(model, devices)
        self._single_device = SingleDeviceSharding(devices[0])
        shapes, full_shapes = model.param_shapes(), model.whole.param_shapes()
        packed = packed_shapes(model)
        if self.group is None:
            engine_shapes, made = self._on_device(shapes), self._on_device(packed)
        else:
            engine_shapes = self.group.shapes(shapes, model.param_specs())
            made = self.group.shapes(packed, model.packed_specs())
        self.leaves: list[jax.ShapeDtypeStruct] = jax.tree.leaves(made)
        jaxpr = jax.make_jaxpr(model.pack)(shapes).jaxpr
        inputs: dict[Any, int] = {var: number for number, var in enumerate(jaxpr.invars)}
        sources = [inputs.get(var) for var in jaxpr.outvars]
        self.computed_leaves = tuple(
            number
            for number, (leaf, source) in enumerate(zip(self.leaves, sources, strict=True))
            if source is None and leaf.size
        )
        self.pack_inputs = tuple(sorted(_needed(jaxpr, set(self.computed_leaves))))
        leaf_of = {source: leaf for leaf, source in enumerate(sources) if source is not None}
        self.params = [
            ParamPlace(name, path, each, own, leaf_of.get(number), self._as_whole(path, each))
            for number, ((path, each), name, own) in enumerate(
                zip(
                    jax.tree.leaves_with_path(full_shapes),
                    named_params(full_shapes),
                    jax.tree.leaves(engine_shapes),
                    strict=True,
                )
            )
        ]
        self.unchanged_params = {each.leaf: each for each in self.params if each.leaf is not None}
        self._tree = jax.tree.structure(shapes)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._lock = threading.Lock()  # so that only one of two engines compiles

    @classmethod
    def of(cls, model: Model, devices: tuple[jax.Device, ...]) -> Self:
        """Returns the programs of this model and these devices, shared by all engines."""
        known = PROCESS_STATE.weight_programs
        with PROCESS_STATE.lock((WeightPrograms, model, devices)):
            if (model, devices) not in known:
                known[model, devices] = cls(model, devices)
            return known[model, devices]

    def __len__(self) -> int:
        return len(self._compiled)

    def is_own(self, place: ParamPlace, value: Any) -> bool:
        """Whether a parameter has the engine's own sharding and layout."""
        own = place.engine_shape
        if value.shape != own.shape:
            return False
        # A trainer's shards may have the engine's sharding but hold other columns.
        same = value.sharding.is_equivalent_to(own.sharding, own.ndim)
        return same and (place.is_contiguous or value.sharding == own.sharding)

    def _as_whole(self, path: Any, full_shape: jax.ShapeDtypeStruct) -> bool:
        if self.group is None:
            return True
        jaxpr = jax.make_jaxpr(functools.partial(self.model.joined_param, path))(full_shape).jaxpr
        return jaxpr.outvars == jaxpr.invars

    def compiled(self, place: ParamPlace, value: Any, *, donates: bool = True) -> bool:
        """Whether `program` has nothing to compile."""
        return self._key(place, value, donates) in self._compiled

    def program(
        self, place: ParamPlace, value: Any, *, donates: bool = True
    ) -> Callable[..., jax.Array]:
        """Returns a program (the engine's buffer, the given parameter) -> that buffer, updated.

        Args:
            donates: If False, the program is (the given parameter) -> a new buffer.
        """
        key = self._key(place, value, donates)
        with self._lock:
            return self._program(key, place, value, donates)

    def _program(self, key: Any, place: ParamPlace, value: Any, donates: bool) -> Any:
        if key not in self._compiled:
            engine_shape, change = place.engine_shape, jnp.copy
            if not self.is_own(place, value):
                change = functools.partial(self.model.joined_param, place.path)
            call = (lambda old, new: change(new)) if donates else change
            jitted = jax.jit(
                call,
                donate_argnums=0 if donates else (),
                keep_unused=True,
                out_shardings=engine_shape.sharding,
            )
            new = jax.ShapeDtypeStruct(value.shape, engine_shape.dtype, sharding=value.sharding)
            self._compiled[key] = jitted.lower(
                *((engine_shape, new) if donates else (new,))
            ).compile()
        return self._compiled[key]

    def _key(self, place: ParamPlace, value: Any, donates: bool) -> Any:
        own = (
            place.engine_shape.shape,
            place.engine_shape.dtype,
            place.engine_shape.sharding,
            donates,
        )
        return own if self.is_own(place, value) else (*own, place.name, value.sharding)

    def pack(self) -> Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]:
        """Returns a program (leaves of `computed_leaves`, donated; `pack_inputs`) -> new leaves."""
        with self._lock:
            return self._pack()

    def _pack(self) -> Any:
        if "pack" not in self._compiled:
            output_shapes, needed = (
                [self.leaves[n] for n in self.computed_leaves],
                list(self.pack_inputs),
            )
            input_shapes = [self.params[n].engine_shape for n in needed]
            function = self._packed
            if self.group is not None:
                before = jax.tree.leaves(self.model.param_specs())
                after = jax.tree.leaves(self.model.packed_specs())
                function = self.group.step(
                    function,
                    ([before[n] for n in needed],),
                    [after[n] for n in self.computed_leaves],
                )
            jitted = jax.jit(
                lambda old, given: function(given),
                donate_argnums=0,
                keep_unused=True,
                out_shardings=[leaf.sharding for leaf in output_shapes],
            )
            self._compiled["pack"] = jitted.lower(output_shapes, input_shapes).compile()
        return self._compiled["pack"]

    def _packed(self, inputs: list[jax.Array]) -> list[jax.Array]:
        """Computes the `computed_leaves`, on one device."""
        shapes = jax.tree.leaves(self.model.param_shapes())
        # Nothing reads the other parameters, so the compiled program contains none of them.
        leaves = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        for number, leaf in zip(self.pack_inputs, inputs, strict=True):
            leaves[number] = leaf
        packed = jax.tree.leaves(self.model.pack(jax.tree.unflatten(self._tree, leaves)))
        return [packed[number] for number in self.computed_leaves]

    def arriving(self, place: ParamPlace, leaf: Any) -> "ArrivingParam":
        """Describes a given parameter. One on other devices will be copied to the engine's."""
        where: Sharding = self._single_device
        if self.group is not None:
            where = self.group.sharding(PartitionSpec())
        found = getattr(leaf, "sharding", None)
        there = found is not None and found.device_set == where.device_set
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found if there else where)
        return ArrivingParam(place, leaf, shape, there)

    def _on_device(self, shapes: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._single_device), shapes
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ArrivingParam:
    """A parameter that was given to an update.

    Attributes:
        value: The array in the caller's form.
        shape: The shape with its sharding over the engine's devices.
        is_on_engine: Whether the array already lies on these devices.
    """

    place: ParamPlace
    value: Any
    shape: jax.ShapeDtypeStruct
    is_on_engine: bool

    def array(self) -> jax.Array:
        """Returns the array on the engine's devices."""
        return self.value if self.is_on_engine else jax.device_put(self.value, self.shape.sharding)


class WeightBuffers:
    """The leaves of packed parameters as the steps take them.

    Attributes:
        programs: The programs that write to the leaves.
        owned: Whether only the engine has each leaf's buffer, so that an update may write to it.
        version: The number of updates so far.
        is_inconsistent: Whether an update failed midway, so that some leaves are new and others are
            not.
        watched: Whether leaves may be gone, because an update shared them or they were released.
    """

    def __init__(self, params: CheckedParams):
        self.programs = WeightPrograms.of(params.model, params.devices)
        self._leaves = list(params.place())
        # An array over several devices may share the caller's buffer on only one of them.
        given = set[tuple[jax.Device, int]]().union(*map(_buffers, jax.tree.leaves(params.params)))
        self.owned = [given.isdisjoint(_buffers(leaf)) for leaf in self._leaves]
        self.version, self.is_inconsistent, self.watched = 0, False, False
        self._original_shapes = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
            )
            for name, leaf in named_params(params.params).items()
        }

    @property
    def gone(self) -> bool:
        """Whether `leaves` raises an error."""
        return self.is_inconsistent or any(leaf.is_deleted() for leaf in self._leaves)

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """The leaves that the steps read.

        Raises:
            RuntimeError: Some leaves are gone; the message says why.
        """
        if self.is_inconsistent:
            raise RuntimeError(
                "an update of the weights failed midway, so some are new and others are not; call "
                "update again"
            )
        for number, (leaf, owned) in enumerate(zip(self._leaves, self.owned, strict=True)):
            if leaf.is_deleted():
                place = self.programs.unchanged_params.get(number)
                what = (
                    "packed parameters were" if place is None else f"parameter {place.name!r} was"
                )
                why = "released" if owned else "donated or deleted by its owner"
                raise RuntimeError(f"{what} {why}; call update with new parameters")
        return tuple(self._leaves)

    def check(
        self, params: Any, *, strict: bool = False, shapes: bool = False
    ) -> list[ArrivingParam]:
        """Returns the parameters in the model's order, without changing anything.

        Args:
            strict: Whether to refuse parameters that need a program that is not compiled.
            shapes: Whether to accept shapes instead of arrays.

        Raises:
            ValueError: The parameters differ from the model's; the message names all differences.
        """
        named, programs = named_params(params), self.programs
        problems = param_differences(
            {each.name: (each.full_shape, each.engine_shape) for each in programs.params}, named
        )
        for name, leaf in named.items():
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                problems.append(f"parameter {name!r} was deleted or donated")
            elif isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
                problems.append(f"parameter {name!r} is a shape without an array")
            elif isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                problems.append(f"parameter {name!r} is on devices of other processes")
        if problems:
            what = "expect_updates" if shapes else "update"
            raise ValueError(f"{what}: {'; '.join(problems)}. The engine's weights are unchanged")
        arriving = [programs.arriving(each, named[each.name]) for each in programs.params]
        if others := [each for each in arriving if strict and self._uncompiled(each)]:
            names = "; ".join(
                f"parameter {each.place.name!r} with {each.shape.sharding}" for each in others
            )
            raise ValueError(
                f"update: nothing is compiled for {names}. A strict engine does not compile after "
                "its start: call expect_updates(params) before start(). The engine's weights are "
                "unchanged"
            )
        return arriving

    def compile(self, arriving: Sequence[ArrivingParam]) -> None:
        """Compiles the programs that these parameters need, unless they are compiled."""
        for each in arriving:
            for donates in self._uncompiled(each):
                self.programs.program(each.place, each.shape, donates=donates)
        if self.programs.computed_leaves:
            self.programs.pack()

    def compile_own(self) -> None:
        """Compiles the programs for parameters with the shardings of the original ones."""
        # Packed parameters have other names, and already the engine's shardings.
        places = self.programs.params
        given = [self._original_shapes.get(each.name, each.engine_shape) for each in places]
        self.compile([self.programs.arriving(*each) for each in zip(places, given, strict=True)])

    def _uncompiled(self, param: ArrivingParam) -> list[bool]:
        """Returns the programs (`donates`) to compile for a parameter, also for later updates."""
        programs, place = self.programs, param.place
        own = programs.is_own(place, param.shape)
        if place.leaf is None:
            wanted = [] if own else [False]
        else:  # an array with the engine's sharding is copied into a new buffer without a program
            there = self.owned[place.leaf] and not self._leaves[place.leaf].is_deleted()
            wanted = [True] if own or there else [False, True]
        return [x for x in wanted if not programs.compiled(place, param.shape, donates=x)]

    def update(self, arriving: Sequence[ArrivingParam], *, share: bool) -> None:
        """Writes new weights into the leaves, with the programs that `compile` has compiled.

        Args:
            share: Whether to use arrays with the engine's sharding directly, without a copy.
        """
        programs, needed = self.programs, {}
        self.is_inconsistent = self.watched = True
        for number, each in enumerate(arriving):
            new = self._written(each, share=share)
            if number in programs.pack_inputs:
                needed[number] = new
        if programs.computed_leaves:
            old = [self._donor(number) for number in programs.computed_leaves]
            found = programs.pack()(old, [needed[number] for number in programs.pack_inputs])
            for number, leaf in zip(programs.computed_leaves, found, strict=True):
                self._leaves[number], self.owned[number] = leaf, True
        self.is_inconsistent = False
        self.watched = not all(self.owned[leaf] for leaf in programs.unchanged_params)
        self.version += 1

    def delete(self) -> int:
        """Frees the engine's own buffers and returns their bytes per device.

        `update` must supply weights again.
        """
        both = zip(self._leaves, self.owned, strict=True)
        own = [leaf for leaf, owned in both if owned and leaf.size and not leaf.is_deleted()]
        freed = nbytes_each(own)
        for leaf in own:
            leaf.delete()
        self.watched = True
        return freed

    def _written(self, param: ArrivingParam, *, share: bool) -> jax.Array:
        """Writes a parameter into its leaf, if it has one. Returns it over the engine's devices."""
        programs, place = self.programs, param.place
        is_own, leaf = programs.is_own(place, param.shape), place.leaf
        if leaf is None:
            array = param.array()
            return array if is_own else programs.program(place, param.shape, donates=False)(array)
        old = self._leaves[leaf]
        if old is param.value:
            return old
        shared = share and is_own and param.is_on_engine
        if shared:
            array = param.value
        elif self.owned[leaf] and not old.is_deleted():
            array = programs.program(place, param.shape)(old, param.array())
        elif is_own:
            array = jax.device_put(param.value, place.engine_shape.sharding, may_alias=False)
        else:
            array = programs.program(place, param.shape, donates=False)(param.array())
        self._leaves[leaf], self.owned[leaf] = array, not shared
        return array

    def _donor(self, number: int) -> jax.Array:
        """Returns the buffer to donate for a leaf that `pack` computes."""
        leaf = self._leaves[number]
        if self.owned[number] and not leaf.is_deleted():
            return leaf
        shape = self.programs.leaves[number]
        return jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding)


def _buffers(leaf: Any) -> set[tuple[jax.Device, int]]:
    """Returns the device and the address of each shard of an array."""
    if not isinstance(leaf, jax.Array) or not leaf.size:
        return set()
    return {(each.device, each.data.unsafe_buffer_pointer()) for each in leaf.addressable_shards}


def _needed(jaxpr: Any, outputs: set[int]) -> set[int]:
    """Returns the indices of the arguments on which these outputs depend."""
    needed_vars = {jaxpr.outvars[number] for number in outputs}
    for equation in reversed(jaxpr.eqns):
        used = {n for n, var in enumerate(equation.outvars) if var in needed_vars}
        inner = equation.params.get("jaxpr")
        if used and inner is not None and equation.primitive.name in ("jit", "pjit"):
            needed_vars |= {
                equation.invars[n] for n in _needed(inner.jaxpr, used) if _named(equation, n)
            }
        elif used:
            needed_vars |= {var for var in equation.invars if not isinstance(var, Literal)}
    return {number for number, var in enumerate(jaxpr.invars) if var in needed_vars}


def _named(equation: Any, number: int) -> bool:
    return not isinstance(equation.invars[number], Literal)
