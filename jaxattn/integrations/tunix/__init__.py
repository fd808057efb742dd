"""Tunix (google-tunix) with jaxattn's engine as its rollout, and the same model as its policy.

    policy = Policy.of(model, params)
    cluster = RLCluster(
        actor=policy,
        tokenizer=TokenIds(tokenizer),
        cluster_config=ClusterConfig(rollout_engine=EngineRollout, ...),
    )

needs `pip install 'jaxattn[tunix]'`. docs/tunix.md walks through it, and examples/grpo.py is a run.
"""

import importlib.util

if importlib.util.find_spec("tunix") is None:
    raise ImportError(
        "jaxattn.integrations.tunix needs google-tunix: pip install 'jaxattn[tunix]'", name="tunix"
    )

from jaxattn.integrations.tunix.policy import Policy as Policy
from jaxattn.integrations.tunix.rollout import EngineRollout as EngineRollout
from jaxattn.integrations.tunix.tokenizer_adapter import TokenIds as TokenIds
