"""The options of replicas, the decisions of autoscaling, and merged metrics."""

import builtins
import sys
from types import SimpleNamespace

import pytest

from rjax.commands.serve.command import main
from rjax.errors import InvalidConfigError
from rjax.extras import install_command
from rjax.replicas.autoscaling import QueueAndKvPolicy
from rjax.replicas.fleet import check_gpus
from rjax.replicas.merged_metrics import merge_expositions
from rjax.serve.config.replica_options import ReplicaOptions


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--replicas", "0"], "--replicas is 0; give 1 to 1024"),
        (["--max-replicas", "2"], "--max-replicas does nothing without --replicas"),
        (["--ray-address", "auto"], "--ray-address does nothing without --replicas"),
        (["--replicas", "2", "--min-replicas", "1"], "does nothing without --max-replicas"),
        (["--replicas", "2", "--target-kv-usage", "0.5"], "does nothing without --max-replicas"),
        (["--replicas", "4", "--max-replicas", "3"], "give them in this order"),
        (["--replicas", "1", "--max-replicas", "3", "--target-kv-usage", "2"], "up to 1"),
        (["--replicas", "1", "--max-replicas", "3", "--upscale-delay-seconds", "-1"], "86400"),
        (["--replicas", "2", "--request-router", "best"], "give prefix, round-robin, power-of-two"),
        (["--replicas", "2", "--imbalanced-threshold", "0"], "give more than 0"),
        (
            ["--replicas", "2", "--imbalanced-threshold", "5", "--request-router", "round-robin"],
            "does nothing with --request-router round-robin",
        ),
        (["-dp", "2"], "rjax serve --replicas N"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line(given, said, capsys):
    assert main(given) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("rjax serve: error: ")]
    assert len(lines) == 1
    assert said in lines[0]


def test_without_ray_the_command_says_what_to_install(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without_ray(name, *more):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    assert main(["--replicas", "2", "--port", "0"]) == 2
    assert install_command("ray") in capsys.readouterr().err


def test_autoscaling_follows_the_queue_and_the_kv_pool():
    policy = QueueAndKvPolicy(target_ongoing_requests=None, target_kv_usage=0.5)

    def desired(sequences, kv, queued=0.0):
        batch = [4.0] * len(sequences)
        return policy.desired(sequences=sequences, max_num_seqs=batch, kv_usage=kv, queued=queued)

    assert desired([0.0], [0.0]) == 1
    assert desired([4.0], [0.1]) == 1
    assert desired([5.0], [0.1]) == 2
    assert desired([1.0, 1.0, 1.0], [0.0] * 3) == 1
    assert desired([2.0], [0.1], queued=7.0) == 3
    assert desired([1.0, 1.0], [0.9, 0.8]) == 4  # 1.7 pools in use, half of each
    assert QueueAndKvPolicy(2.0, 1.0).desired(
        sequences=[4.0], max_num_seqs=[64.0], kv_usage=[0.0]
    ) == 2  # fmt: skip


def test_autoscaling_counts_only_replicas_that_run():
    context = SimpleNamespace(
        running_replicas=("a",),
        target_num_replicas=3,
        total_queued_requests=0.0,
        aggregated_metrics={
            "sequences": {"a": 8.0, "dead": 100.0},
            "max_num_seqs": {"a": 4.0, "dead": 4.0},
            "kv_usage": {"a": 0.1, "dead": 1.0},
        },
    )
    policy = QueueAndKvPolicy(None, 0.8)
    assert policy(context) == (2, {})
    context.aggregated_metrics = {}
    assert policy(context) == (3, {})
    context.target_num_replicas, context.total_queued_requests = 0, 1.0
    assert policy(context) == (1, {})


def test_metrics_of_replicas_are_grouped_by_metric():
    def one(value: int) -> bytes:
        return (
            f'# HELP rjax:a A.\n# TYPE rjax:a gauge\nrjax:a{{model_name="m"}} {value}\n'
            f'# HELP rjax:b B.\n# TYPE rjax:b gauge\nrjax:b{{model_name="m"}} {value + 1}\n'
        ).encode()

    assert merge_expositions([("r0", one(1)), ("r1", one(5))]).decode().splitlines() == [
        "# HELP rjax:a A.",
        "# TYPE rjax:a gauge",
        'rjax:a{replica="r0",model_name="m"} 1',
        'rjax:a{replica="r1",model_name="m"} 5',
        "# HELP rjax:b B.",
        "# TYPE rjax:b gauge",
        'rjax:b{replica="r0",model_name="m"} 2',
        'rjax:b{replica="r1",model_name="m"} 6',
    ]
    assert merge_expositions([]) == b""


def test_replicas_need_gpus_of_one_host_each():
    check_gpus(3, 0, [0.0])
    check_gpus(3, 2, [4.0, 3.0])
    with pytest.raises(InvalidConfigError, match="a replica uses the GPUs of one host"):
        check_gpus(1, 8, [4.0, 4.0])
    with pytest.raises(InvalidConfigError, match="4 replicas of 2 GPUs do not fit on hosts with"):
        check_gpus(4, 2, [4.0, 3.0])


def test_autoscaling_limits_are_in_order():
    assert ReplicaOptions(replicas=2, max_replicas=4).lowest == 2
    assert ReplicaOptions(replicas=2, min_replicas=1, max_replicas=4).lowest == 1
    with pytest.raises(InvalidConfigError, match="in this order"):
        ReplicaOptions(replicas=2, min_replicas=3, max_replicas=4)
