"""Several GPUs: how they are laid out, and what passes between them inside a step.

    Parallel(data=2, tensor=2, context=2)     the layout (layout.py)
    Group(parallel, devices)                  its mesh, and arrays over it (device_group.py)

A step is one program under `jax.shard_map`. Each GPU runs it with the shapes of its own share of
the model, and meets the others in the few collectives of this room. Nothing here knows a model.
"""

from jaxattn.parallel.collectives import gathered as gathered
from jaxattn.parallel.collectives import met as met
from jaxattn.parallel.collectives import own_part as own_part
from jaxattn.parallel.collectives import rank as rank
from jaxattn.parallel.collectives import total as total
from jaxattn.parallel.context_parallel import Spread as Spread
from jaxattn.parallel.context_parallel import gathered_in as gathered_in
from jaxattn.parallel.context_parallel import pieces_of as pieces_of
from jaxattn.parallel.device_group import Group as Group
from jaxattn.parallel.layout import ALONE as ALONE
from jaxattn.parallel.layout import Dimension as Dimension
from jaxattn.parallel.layout import Parallel as Parallel
from jaxattn.parallel.vocab_parallel import Vocabulary as Vocabulary
