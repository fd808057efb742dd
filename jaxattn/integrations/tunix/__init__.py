"""The Tunix (google-tunix) adapter: jaxattn's engine as the rollout, the same model as the policy.

    policy = Policy.of(model, params)
    cluster = RLCluster(
        actor=policy,
        tokenizer=TokenIds(tokenizer),
        cluster_config=ClusterConfig(rollout_engine=EngineRollout, ...),
    )

This needs `pip install 'jaxattn[tunix]'`. See docs/tunix.md for a guide, and examples/grpo.py for a
complete run.
"""

import importlib.util

if importlib.util.find_spec("tunix") is None:
    raise ImportError(
        "jaxattn.integrations.tunix needs google-tunix: pip install 'jaxattn[tunix]'", name="tunix"
    )

from jaxattn.integrations.tunix.policy import Policy as Policy
from jaxattn.integrations.tunix.rollout import EngineRollout as EngineRollout
from jaxattn.integrations.tunix.tokenizer_adapter import TokenIds as TokenIds
