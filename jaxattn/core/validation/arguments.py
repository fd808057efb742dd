"""Checks an op's arguments one after another: an axis name means one size in all of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.core.validation.array_checks import (
    FLOATS,
    BoundedLengths,
    check_array,
    check_dtype,
    check_layer,
    check_positive,
    keep_concrete,
    number_of,
)
from jaxattn.core.validation.page_table_checks import check_pages, check_write_conflicts

# Page numbers, positions and rows are int32 on the device.
MOST = 2**31 - 1
INT32 = ("int32",)
CACHES = (*FLOATS, "float8_e4m3fn", "uint8")  # cache/formats.py says what each of them holds


@dataclasses.dataclass
class OpArguments:
    """Checks arguments one after another; an axis name means the same size in all of them."""

    op: str
    sizes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def check(self, name: str, x: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> jax.Array:
        """Returns `x` as a JAX array if it is e.g. "B S H D" of one of the dtypes, else raises."""
        self.check_shape(name, x, axes, dtypes)
        return jnp.asarray(x)

    def check_shape(self, name: str, x: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> None:
        """As `check`, without making a JAX array of x."""
        check_array(self.op, name, x)
        check_dtype(self.op, name, x, *dtypes)
        names, shape = axes.split(), tuple(x.shape)
        title = f"{name} [{', '.join(names)}]"
        if len(shape) != len(names) or 0 in shape:
            raise ValueError(
                f"{self.op}: {title} needs {len(names)} axes, none of them empty, got shape {shape}"
            )
        for axis, size in zip(names, shape, strict=True):
            expected, source = self.sizes.setdefault(axis, (size, title))
            if size != expected:
                raise ValueError(
                    f"{self.op}: {title} has shape {shape}, so {axis} = {size}, but {source} has "
                    f"{axis} = {expected}"
                )

    def check_scale(self, scale: Any) -> float:
        scale = number_of(scale)
        if not isinstance(scale, int | float) or isinstance(scale, bool):
            raise TypeError(
                f"{self.op}: scale must be a Python number, got {type(scale).__name__}; DeepSeek's "
                "is jaxattn.softmax_scale(qk_nope_head_dim + qk_rope_head_dim, config)"
            )
        return check_positive(self.op, "scale", scale)

    def check_layer(
        self, kv_cache: Any, layer: Any, axes: str = "N C D", name: str = "kv_cache"
    ) -> None:
        """A stack needs a layer, a plain cache of `axes` has none; and the layer must exist."""
        shape, plain = tuple(getattr(kv_cache, "shape", ())), len(axes.split())
        if layer is None:
            if len(shape) == plain + 1:
                raise ValueError(f"{self.op}: {name} {shape} is a stack of layers; give layer=")
            return
        if len(shape) == plain:
            raise ValueError(
                f"{self.op}: {name} {shape} has no axis for {layer=}; drop layer, or give the "
                f"stack [L, {', '.join(axes.split())}]"
            )
        if len(shape) == plain + 1:
            check_layer(self.op, name, shape, layer)

    def check_paged(
        self,
        kv_cache: Any,
        block_tables: Any,
        seq_lens: Any,
        layer: Any,
        name: str = "kv_cache",
        dtypes: tuple[str, ...] = CACHES,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A cache of latents and its addressing: tables and lengths are checked where known.

        A traced row of more tokens than its table has places comes back as one of 0, padding.

        Args:
            name: of the cache, in messages.
            dtypes: that it may have.
        """
        self.check_layer(kv_cache, layer, name=name)
        # Bytes are not numbers: how many of them a latent takes is the format's to say.
        stored = "Ds" if str(getattr(kv_cache, "dtype", "")) == "uint8" else "D"
        axes = f"N C {stored}" if layer is None else f"L N C {stored}"
        cache = self.check(name, kv_cache, axes, dtypes)
        num_pages, page = cache.shape[-3:-1]
        return cache, *self.check_tables(block_tables, seq_lens, num_pages, page, name)

    def check_tables(
        self, block_tables: Any, seq_lens: Any, num_pages: int, page: int, name: str = "kv_cache"
    ) -> tuple[jax.Array, jax.Array]:
        """The addressing of a cache `name` of so many pages of `page` tokens, checked where it is
        known.

        A traced row of more tokens than its table has places comes back as one of 0, padding.
        """
        known_tables, tables = self.integers("block_tables", block_tables, "B M")
        width: int = tables.shape[1]
        known_lengths, lengths = self.lengths(
            "seq_lens",
            seq_lens,
            width * page,
            f"block_tables {tables.shape} with pages of {page} tokens reach {width * page}; "
            "give wider block_tables",
        )
        check_pages(self.op, known_tables, known_lengths, num_pages, page, name)
        return tables, lengths

    def check_scheduled(self, seq_lens: Any, max_pages: int, page_size: int) -> jax.Array:
        """The lengths of a schedule's rows, whose tables have so many pages of so many tokens.

        A traced row of more tokens comes back as one of 0, padding.
        """
        most = max_pages * page_size
        but = (
            f"{max_pages=} of {page_size=} tokens reach {most}; give wider block_tables, and "
            "their width as max_pages"
        )
        return self.lengths("seq_lens", seq_lens, most, but)[1]

    def check_query_lens(self, query_lens: Any, name: str, tokens: jax.Array) -> jax.Array:
        """How many of `tokens` [B, S, ...] are each row's, from the left; the rest is padding.

        A traced row with more of them than S has none.
        """
        most = tokens.shape[1]
        but = f"{name} {tokens.shape} has {most} tokens per row"
        return self.lengths("query_lens", query_lens, most, but)[1]

    def check_written(
        self, given: tuple[Any, Any, Any], name: str, tokens: jax.Array, page: int
    ) -> jax.Array | None:
        """The checked `query_lens`, after the check of what a write of `tokens` [B, S, ...] does.

        Without `query_lens` a row writes all of its S tokens. What is traced is not looked at.

        Args:
            given: block_tables, seq_lens and query_lens as the caller gave them; the first two
                have passed `check_tables`.
            name: of `tokens`, in messages.
            page: tokens of a page.

        Returns:
            `query_lens`, int32 [B], or None where none were given.

        Raises:
            TypeError, ValueError: `query_lens` do not fit, or two tokens have one place.
        """
        tables, lengths, new = given
        lengths = lengths.lengths if isinstance(lengths, BoundedLengths) else lengths
        checked = None if new is None else self.check_query_lens(new, name, tokens)
        new = tokens.shape[1] if new is None else new
        check_write_conflicts(
            self.op, keep_concrete(tables), keep_concrete(lengths), keep_concrete(new), page
        )
        return checked

    def check_new(
        self,
        given: tuple[Any, Any, Any],
        seq_lens: jax.Array,
        name: str,
        tokens: jax.Array,
        page: int,
    ) -> jax.Array:
        """As `check_written`, with S for each row [B] of the checked `seq_lens` where no
        `query_lens` were given."""
        checked = self.check_written(given, name, tokens, page)
        return jnp.full_like(seq_lens, tokens.shape[1]) if checked is None else checked

    def integers(self, name: str, x: Any, axes: str) -> tuple[Any, jax.Array]:
        """An argument of int32 numbers; lists and other integers are taken where they fit.

        Returns:
            What is known of it: a NumPy array, JAX's, or a tracer; and the JAX array, int32.
        """
        title = f"{name} [{', '.join(axes.split())}]"
        x = x.lengths if isinstance(x, BoundedLengths) else x
        if not isinstance(x, list | tuple | int):
            check_array(self.op, name, x)
        try:
            known = keep_concrete(x)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.op}: {title} must be integers in rows of equal length, got "
                f"{type(x).__name__} {_shortened(x)}"
            ) from None
        if isinstance(x, list | tuple) and known.size == 0:
            known = known.astype(np.int32)  # NumPy takes an empty list for floats
        if not jnp.issubdtype(known.dtype, jnp.integer):
            raise TypeError(
                f"{self.op}: {name} must be integers, got {known.dtype} {tuple(known.shape)}"
            )
        if known.dtype != jnp.int32:
            known = self._narrowed(name, known)
        return known, self.check(name, known, axes, INT32)

    def _narrowed(self, name: str, known: Any) -> Any:
        """Other integers as int32.

        Traced ones that do not fit become its first or last: no row is so long, no cache has such
        a page.
        """
        if not isinstance(known, jax.core.Tracer):
            known = np.asarray(known)
            for value in (known.min(), known.max()) if known.size else ():
                if not -MOST - 1 <= int(value) <= MOST:
                    raise ValueError(
                        f"{self.op}: {name} {known.shape} holds {value}, which does not fit in "
                        "int32"
                    )
            return known.astype(np.int32)
        wide = jnp.iinfo(known.dtype)
        low, high = max(int(wide.min), -MOST - 1), min(int(wide.max), MOST)
        return jnp.clip(known, low, high).astype(jnp.int32)

    def lengths(self, name: str, x: Any, most: int, but: str) -> tuple[Any, jax.Array]:
        """Lengths of rows [B], from 0 to `most`: others are refused for the reason that `but`
        gives, or, where they are traced, are those of padding.

        Returns:
            As `integers`.
        """
        known, lengths = self.integers(name, x, "B")
        self.check_most(f"{name} {lengths.shape}", known, most, but)
        checked = isinstance(x, BoundedLengths) and x.most <= most
        if isinstance(known, jax.core.Tracer) and most < MOST and not checked:
            # Such a row is marked by what padding gives. Cut to `most`, it would give numbers.
            lengths = jnp.where(lengths > most, 0, lengths)
        return known, lengths

    def check_most(self, described: str, lengths: Any, most: int, but: str) -> None:
        """Refuses lengths below 0 and beyond `most`, for the reason that `but` gives, unless they
        are traced: what is known now is checked now."""
        if isinstance(lengths, jax.core.Tracer):
            return
        if (longest := int(np.asarray(lengths).max())) > most:
            raise ValueError(f"{self.op}: {described} holds {longest}, but {but}")
        if (shortest := int(np.asarray(lengths).min())) < 0:
            raise ValueError(
                f"{self.op}: {described} holds {shortest}, but lengths must be at least 0; a "
                "padding row has 0"
            )


def _shortened(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:76]} ..."
