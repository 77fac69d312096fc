"""rjax as a rollout of verl; needs verl and Ray.

verl imports this module in each of its processes, which registers the name ``rjax``, when the
environment says so; the configuration then chooses it::

    export VERL_USE_EXTERNAL_MODULES=rjax.integrations.verl
    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=rjax ...

`rjax.integrations.verl.replica.RjaxReplica` starts an `rjax.integrations.verl.server.RjaxServer`, a
Ray actor with an engine, which verl's agent loops ask for tokens;
`rjax.integrations.verl.rollout.RjaxRollout` is in the trainer's workers and sends it their weights.
"""

from verl.workers.rollout import base, replica

NAME = "rjax"
"""The rollout's name in verl's configuration."""


def _load_replica() -> type[replica.RolloutReplica]:
    from rjax.integrations.verl.replica import RjaxReplica

    return RjaxReplica


base._ROLLOUT_REGISTRY[NAME, "async"] = "rjax.integrations.verl.rollout.RjaxRollout"
replica.RolloutReplicaRegistry.register(NAME, _load_replica)
