"""Several GPUs: their layout, and the collectives inside a step.

    Parallel(data=2, tensor=2, context=2)     the layout (layout.py)
    DeviceGroup(parallel, devices)            its mesh, and arrays over it (device_group.py)

A step is one program under `jax.shard_map`. Each GPU runs it with the shapes of its own share of
the model, and communicates only by the collectives of this package, which depend on no model.
"""

from jaxattn.parallel.collectives import all_gather as all_gather
from jaxattn.parallel.collectives import all_gather_via_all_reduce as all_gather_via_all_reduce
from jaxattn.parallel.collectives import all_reduce as all_reduce
from jaxattn.parallel.collectives import local_shard as local_shard
from jaxattn.parallel.collectives import rank as rank
from jaxattn.parallel.context_parallel import ContextParallelPages as ContextParallelPages
from jaxattn.parallel.context_parallel import gathered_in as gathered_in
from jaxattn.parallel.context_parallel import pieces_of as pieces_of
from jaxattn.parallel.device_group import DeviceGroup as DeviceGroup
from jaxattn.parallel.layout import ALONE as ALONE
from jaxattn.parallel.layout import Dimension as Dimension
from jaxattn.parallel.layout import Parallel as Parallel
from jaxattn.parallel.sharded_vocabulary import ShardedVocabulary as ShardedVocabulary
