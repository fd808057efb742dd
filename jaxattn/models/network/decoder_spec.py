"""The specification of a decoder: its layers in order, their segments and shared caches."""

import dataclasses
from collections import Counter
from functools import cached_property

from jaxtyping import Array

from jaxattn.core.layer_index import LayerIndex
from jaxattn.kernels.collectives.all_reduce_norm import supports_all_reduce
from jaxattn.models.blocks import Block, Mixer, Stream
from jaxattn.models.blocks.paged_mixer import PagedMixer
from jaxattn.models.caches.draft_inputs import DraftInputs
from jaxattn.models.caches.layer_cache import LayerCache, check_caches
from jaxattn.models.caches.symmetric_memory import (
    EXCHANGE,
    MEETING,
    SymmetricMemoryCache,
    most_tokens,
)
from jaxattn.models.network.layer_segments import LayerSegment, derive
from jaxattn.parallel import ALONE, Parallel, pieces_of


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """A multi-token prediction (MTP) head, which guesses the token after the next.

    The head is an additional layer after the others. The layer reads the output head's input for a
    token, together with the embedding of the next token.

    Attributes:
        returns_normed: Whether the next guess reads the layer's output after its last norm instead
            of before it.
    """

    returns_normed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The specification of a decoder's layers and of what surrounds them.

    Attributes:
        blocks: One block per layer, in order; the last one is the draft head's, if there is one.
        draft_head: The draft head, or None.
        tie_embeddings: Whether the output head is the transposed embedding.
        parallel: The layout of the GPUs that share the decoder; these blocks are one GPU's
            (`models.sharding`).
        fused_tokens: The largest decode step, in tokens, that sums over the GPUs, adds the residual
            and norms in one launch, if `sums_fused`. 0 means never. None means as many as send 2
            MiB from each GPU.
        max_position_embeddings: Maximum length of a row in tokens. No allocation depends on it.

    Raises:
        TypeError: An element of `blocks` is not a `Block`.
        ValueError: There are no layers or too many, or blocks of one cache differ; the message
            names it.
    """

    vocab_size: int
    stream: Stream
    blocks: tuple[Block, ...]
    max_position_embeddings: int
    tie_embeddings: bool = False
    parallel: Parallel = ALONE
    fused_tokens: int | None = None
    draft_head: DraftHead | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for layer, block in enumerate(self.blocks):
            if not isinstance(block, Block):
                raise TypeError(f"blocks[{layer}] must be a Block, got {type(block).__name__}")
        mixers: dict[str, Mixer] = {}
        for layer, mixer in enumerate(block.mixer for block in self.blocks):
            first = mixers.setdefault(mixer.cache_name, mixer)
            if mixer != first:
                raise ValueError(
                    f"layer {layer} has a {type(mixer).__name__} that differs from earlier ones "
                    f"in the cache {mixer.cache_name!r}: {mixer} and {first}"
                )
        _ = self.segments
        check_caches(self.caches)

    @property
    def head_columns(self) -> int:
        """The number of tokens for which one GPU has logits, padding of the last GPU included."""
        return -(-self.vocab_size // self.parallel.tensor)

    @property
    def layers(self) -> int:
        """The number of blocks in a step, without the draft head's."""
        return len(self.blocks) - (self.draft_head is not None)

    @cached_property
    def segments(self) -> tuple[LayerSegment[Block], ...]:
        """The segments of the layers, followed by that of the draft head, if there is one."""
        of_layers, of_draft = derive(self.blocks[: self.layers]), self.blocks[self.layers :]
        return *of_layers, *(LayerSegment(self.layers, (block,), 1) for block in of_draft)

    @property
    def layer_segments(self) -> tuple[LayerSegment[Block], ...]:
        """The segments without that of the draft head."""
        return self.segments[:-1] if self.draft_head else self.segments

    @cached_property
    def mixers(self) -> dict[str, Mixer]:
        """The mixer of each cache, by the cache's name."""
        return {block.mixer.cache_name: block.mixer for block in self.blocks}

    @cached_property
    def caches(self) -> tuple[LayerCache, ...]:
        layers = Counter(block.mixer.cache_name for block in self.blocks)
        caches = [mixer.cache(self.stream, layers[n]) for n, mixer in self.mixers.items()]
        if self.draft_head:
            caches.append(DraftInputs.of(self.stream))
        if self.sums_fused:
            features, gpus = self.stream.hidden_size, self.parallel.gpus
            caches.append(
                SymmetricMemoryCache(gpus=gpus, tokens=self.summed_tokens, features=features)
            )
        if pieces := self.exchanged_in:
            number, widest = pieces
            tokens = self.summed_tokens * number
            caches.append(
                SymmetricMemoryCache(name=EXCHANGE, gpus=gpus, tokens=tokens, features=widest)
            )
            room = {each.meeting for each in self.paged}
            if len(room) == 1 and (most := room.pop()):
                tokens, features = most
                caches.append(
                    SymmetricMemoryCache(name=MEETING, gpus=gpus, tokens=tokens, features=features)
                )
        return tuple(caches)

    @property
    def summed_tokens(self) -> int:
        """The most tokens of a data group whose sums are one launch, if `sums_fused`."""
        if self.fused_tokens is None:
            return most_tokens(self.stream.hidden_size, self.parallel.gpus)
        return self.fused_tokens

    @property
    def sums_fused(self) -> bool:
        """Whether one launch may sum over the GPUs, add and norm.

        The launch sends bfloat16. The GPUs must be one tensor group, or data groups of one GPU each
        whose tokens are gathered at experts. Norms of the outputs themselves (`norms_after`) rule
        it out, because they come before the addition.
        """
        parallel, stream = self.parallel, self.stream
        if any(block.norms_after for block in self.blocks):
            return False
        fits = stream.dtype == "bfloat16" and supports_all_reduce(stream.hidden_size, parallel.gpus)
        divided = parallel.data == 1 < parallel.tensor or self.gathers_tokens
        return bool(self.summed_tokens) and divided and fits

    @property
    def paged(self) -> list[PagedMixer]:
        """The mixers that attend over pages."""
        return [each for each in self.mixers.values() if isinstance(each, PagedMixer)]

    @property
    def exchanged_in(self) -> tuple[int, int] | None:
        """(pieces, size of a piece) of a row, if one launch exchanges rows between GPUs.

        The GPUs have parts of the row's pages. None means that XLA's collectives exchange rows.
        """
        found = {pieces_of(*each.exchanged) for each in self.paged}
        alike = len(found) == 1 and self.sums_fused
        return found.pop() if alike and 1 < self.parallel.context == self.parallel.gpus else None

    @property
    def gathers_tokens(self) -> bool:
        """Whether all GPUs have their own tokens, which are gathered at experts."""
        parallel = self.parallel
        return parallel.tensor == 1 and parallel.experts_meet and parallel.expert == parallel.gpus

    def layer_of(self, segment: LayerSegment[Block], place: int, next_repeat: Array) -> LayerIndex:
        """Returns a layer's index within its cache.

        The layer is at a place of a segment's pattern, in the repeat before `next_repeat`.
        """
        name = segment.pattern[place].mixer.cache_name

        def count(blocks: tuple[Block, ...]) -> int:
            return sum(block.mixer.cache_name == name for block in blocks)

        before = count(self.blocks[: segment.first]) + count(segment.pattern[:place])
        per_repeat = count(segment.pattern)
        return LayerIndex(next_repeat, per_repeat, before - per_repeat)
