"""The most tokens that the caches of a layout hold, in all its data groups together.

From shapes: pages in what a plan leaves of a card beside weights, scratch, a slot per row and the
step's temp. Pages over GPUs (`context`) count once each.
"""

from typing import Any

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.memory.plan import nbytes
from jaxattn.models.caches.layer_cache import CacheSize
from jaxattn.parallel import Parallel

UTILIZATION = 0.9  # of a card, as a plan takes it unless it is told another


def cache_tokens(model: Any, parallel: Parallel, *, total: int, rows: int, held: int) -> int:
    """The tokens; 0 where weights and slots alone have no room, or where the model has no pages.

    Args:
        model: that one GPU runs.
        total: bytes of a card.
        rows: of a data group.
        held: bytes beside the caches: of weights, scratch and temp.
    """

    def size(pages: int) -> int:
        wanted = CacheSize(pages=pages, slots=rows)
        return sum(nbytes(cache.shapes(wanted)) for cache in model.caches)

    page = size(2) - size(1)
    if not page:
        return 0
    pages = 1 + (int(total * UTILIZATION) - held - size(1)) // page
    return max(pages, 0) * PAGE_SIZE * parallel.context * parallel.data
