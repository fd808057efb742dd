"""Checks of an op's arguments, in which an axis name means one size for all arguments."""

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
CACHES = (*FLOATS, "float8_e4m3fn", "uint8")  # cache/formats.py defines what each of them holds


@dataclasses.dataclass
class OpArguments:
    """Checks arguments one after another; an axis name means the same size in all of them."""

    op: str
    sizes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def check(self, name: str, x: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> jax.Array:
        """Returns `x` as a JAX array if it has axes such as "B S H D" and one of the dtypes."""
        self.check_shape(name, x, axes, dtypes)
        return jnp.asarray(x)

    def check_shape(self, name: str, x: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> None:
        """Does the same as `check` without creating a JAX array of x."""
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
        """Raises unless a stack comes with an existing layer, and a cache of `axes` without one."""
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
        """Checks a cache of latents with its block tables and lengths, by value if concrete.

        A traced row with more tokens than its table has places gets length 0, which marks padding.

        Args:
            name: Name of the cache, for messages.
            dtypes: Allowed dtypes of the cache.
        """
        self.check_layer(kv_cache, layer, name=name)
        # The number of bytes per latent depends on the format.
        stored = "Ds" if str(getattr(kv_cache, "dtype", "")) == "uint8" else "D"
        axes = f"N C {stored}" if layer is None else f"L N C {stored}"
        cache = self.check(name, kv_cache, axes, dtypes)
        num_pages, page = cache.shape[-3:-1]
        return cache, *self.check_tables(block_tables, seq_lens, num_pages, page, name)

    def check_tables(
        self, block_tables: Any, seq_lens: Any, num_pages: int, page: int, name: str = "kv_cache"
    ) -> tuple[jax.Array, jax.Array]:
        """Checks block tables and lengths for `num_pages` pages of `page` tokens, if concrete.

        A traced row with more tokens than its table has places gets length 0, which marks padding.
        `name` is that of the cache.
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
        """Checks the lengths of a schedule's rows, with tables of `max_pages` pages.

        A traced row with more tokens gets length 0, which marks padding.
        """
        most = max_pages * page_size
        but = (
            f"{max_pages=} of {page_size=} tokens reach {most}; give wider block_tables, and "
            "their width as max_pages"
        )
        return self.lengths("seq_lens", seq_lens, most, but)[1]

    def check_query_lens(self, query_lens: Any, name: str, tokens: jax.Array) -> jax.Array:
        """Checks how many of `tokens` [B, S, ...] belong to each row; they come first.

        A traced row with more than S has none.
        """
        max_length = tokens.shape[1]
        reason = f"{name} {tokens.shape} has {max_length} tokens per row"
        return self.lengths("query_lens", query_lens, max_length, reason)[1]

    def check_written(
        self, row_arguments: tuple[Any, Any, Any], name: str, tokens: jax.Array, page: int
    ) -> jax.Array | None:
        """Checks `query_lens` and the write of `tokens` [B, S, ...], and returns `query_lens`.

        Without `query_lens` a row writes all of its S tokens. Traced values are not checked.

        Args:
            row_arguments: block_tables, seq_lens and query_lens as the caller passed them; the
                first two have passed `check_tables`.
            name: Name of `tokens`, for messages.
            page: Number of tokens per page.

        Returns:
            `query_lens`, int32 [B], or None if none were given.

        Raises:
            TypeError, ValueError: `query_lens` do not fit, or two tokens have one place.
        """
        tables, lengths, new = row_arguments
        lengths = lengths.lengths if isinstance(lengths, BoundedLengths) else lengths
        checked = None if new is None else self.check_query_lens(new, name, tokens)
        new = tokens.shape[1] if new is None else new
        check_write_conflicts(
            self.op, keep_concrete(tables), keep_concrete(lengths), keep_concrete(new), page
        )
        return checked

    def check_new(
        self,
        row_arguments: tuple[Any, Any, Any],
        seq_lens: jax.Array,
        name: str,
        tokens: jax.Array,
        page: int,
    ) -> jax.Array:
        """Does the same as `check_written`, but returns S for each row if `query_lens` is None."""
        checked = self.check_written(row_arguments, name, tokens, page)
        return jnp.full_like(seq_lens, tokens.shape[1]) if checked is None else checked

    def integers(self, name: str, x: Any, axes: str) -> tuple[Any, jax.Array]:
        """Returns an argument of int32 numbers; lists and other integers are accepted if they fit.

        Returns:
            Its known form (a NumPy array, a JAX array, or a tracer), and the int32 JAX array.
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
        """Casts other integers to int32.

        Traced ones that do not fit are clipped: no row is so long, and no cache has such a page.
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
        limits = jnp.iinfo(known.dtype)
        low, high = max(int(limits.min), -MOST - 1), min(int(limits.max), MOST)
        return jnp.clip(known, low, high).astype(jnp.int32)

    def lengths(self, name: str, x: Any, max_length: int, reason: str) -> tuple[Any, jax.Array]:
        """Checks lengths of rows [B], from 0 to `max_length`.

        Other concrete lengths raise an error with the `reason`; traced ones become padding.

        Returns:
            As `integers`.
        """
        known, lengths = self.integers(name, x, "B")
        self.check_most(f"{name} {lengths.shape}", known, max_length, reason)
        checked = isinstance(x, BoundedLengths) and x.max_length <= max_length
        if isinstance(known, jax.core.Tracer) and max_length < MOST and not checked:
            # Such a row gets the results of padding. Clipping would give it numbers.
            lengths = jnp.where(lengths > max_length, 0, lengths)
        return known, lengths

    def check_most(self, label: str, lengths: Any, max_length: int, reason: str) -> None:
        """Raises if concrete lengths are negative or exceed `max_length`, with the `reason`."""
        if isinstance(lengths, jax.core.Tracer):
            return
        if (longest := int(np.asarray(lengths).max())) > max_length:
            raise ValueError(f"{self.op}: {label} holds {longest}, but {reason}")
        if (shortest := int(np.asarray(lengths).min())) < 0:
            raise ValueError(
                f"{self.op}: {label} holds {shortest}, but lengths must be at least 0; a "
                "padding row has 0"
            )


def _shortened(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:76]} ..."
