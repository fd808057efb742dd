"""Tunix (google-tunix) with jaxattn's engine as its rollout, and the same model as its policy.

    policy = Policy.of(model, params)
    cluster = RLCluster(
        actor=policy,
        tokenizer=TokenIds(tokenizer),
        cluster_config=ClusterConfig(rollout_engine=EngineRollout, ...),
    )

needs `pip install 'jaxattn[tunix]'`. docs/tunix.md walks through it, and examples/grpo.py is a run.
"""

from jaxattn.integrations.tunix.policy import Policy as Policy
from jaxattn.integrations.tunix.rollout import EngineRollout as EngineRollout
from jaxattn.integrations.tunix.token_ids import TokenIds as TokenIds
