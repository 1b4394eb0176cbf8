"""The processes of a run with their machines and arguments; clusters described by a file."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.environment import environment
from paceline.errors import UsageError
from paceline.filters import FILTERS
from paceline.launch.engines.placement import Placement
from paceline.launch.flags import RENDEZVOUS_PORT, FilterModuleFlags
from paceline.launch.run.options import RunOptions
from paceline.launch.run.plan import lay_out_node, lay_out_worker, parse_cluster, plan_ranks, servers_of_node
from paceline.launch.run.run import run_script
from paceline.launch.run.setup import plan_node
from paceline.strategies import StrategyFlags, choose_strategy
from paceline.strategies.elastic import ElasticFlags

_ALL_REDUCE = choose_strategy("all-reduce", processes=6)


def test_the_environment_of_ranks_on_one_of_several_nodes() -> None:
    layout = lay_out_node(nproc_per_node=2, nnodes=3, node_rank=1, master_addr="10.0.0.1", master_port=None)
    inherited = {
        "HOME": "/h", "RANK": "9", "PACELINE_SCHEDULER": "x", "PACELINE_REPLICAS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_RANK": "1",
    }  # fmt: skip
    plans = plan_ranks(layout, _ALL_REDUCE, inherited, token="t", scheduler=None, threads=None, cores=8)
    assert [(plan.rank, plan.log_prefix) for plan in plans] == [(2, "rank2."), (3, "rank3.")]
    assert plans[1].environment == {
        "HOME": "/h", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
        "PACELINE_ROLE": "worker", "PACELINE_STRATEGY": "all-reduce", "PACELINE_TOKEN": "t", "OMP_NUM_THREADS": "4",
    }  # fmt: skip


def test_the_variables_of_horovodrun_on_unequal_nodes() -> None:
    """Three nodes have three, one and two ranks."""
    layout = replace(
        lay_out_node(nproc_per_node=2, nnodes=3, node_rank=2, master_addr="h", master_port=None),
        ranks=(4, 5),
        world_size=6,
        node_sizes=(3, 1, 2),
    )
    inherited = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_RANK": "9"}
    plans = plan_ranks(layout, _ALL_REDUCE, inherited, token="t", scheduler=None, threads=None, cores=8)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    numbers = [tuple(int(plan.environment[f"HOROVOD_{name}"]) for name in names) for plan in plans]
    assert numbers == [(4, 6, 0, 2, 2, 3), (5, 6, 1, 2, 1, 2)]
    assert plans[0].environment["HOROVOD_HOSTNAME"] == platform.node()
    assert [plan.log_prefix for plan in plans] == ["rank.4/", "rank.5/"]
    plans = plan_ranks(
        replace(layout, world_size=11), _ALL_REDUCE, inherited, token="t", scheduler=None, threads=None, cores=8
    )
    assert plans[0].log_prefix == "rank.04/"


def test_more_nodes_may_join_up_to_the_largest_number_of_ranks() -> None:
    lay_out = partial(lay_out_node, nproc_per_node=2, nnodes=1, master_addr="h", master_port=None, max_ranks=9)
    layout = lay_out(node_rank=3)
    assert (layout.ranks, layout.world_size, layout.master_port) == ((6, 7), 2, RENDEZVOUS_PORT)
    with pytest.raises(UsageError, match="there are 4 nodes"):
        lay_out(node_rank=4)
    with pytest.raises(UsageError, match=r"--max-ranks 9: more nodes may join.* or, .* --nproc-per-node 9 without"):
        lay_out(node_rank=0, master_addr=None)


def test_nodes_that_may_be_more_have_a_token_and_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions(
        script="s.py", nproc_per_node=1, node_rank=2, master_port=29501, max_ranks=4, strategy="all-reduce",
        flags=StrategyFlags(elastic=ElasticFlags(min_ranks=1)),
    )  # fmt: skip
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(UsageError, match="--master-addr"):
        plan_node(options)
    options = replace(options, master_addr="127.0.0.1")
    with pytest.raises(UsageError, match="PACELINE_TOKEN"):
        plan_node(options)
    monkeypatch.setenv("PACELINE_TOKEN", "a secret of the tests")
    setup = plan_node(options)
    assert setup.layout is not None
    (plan,) = plan_ranks(setup.layout, setup.choice, {}, token="t", scheduler=None, threads=None, cores=1)
    found = environment(plan.environment)  # raises UsageError if the rank is not below the world size
    assert (found.rank, found.world_size) == (2, 4)
    placement = Placement(launcher=0, num_launchers=2, address="h", job="1")
    with pytest.raises(UsageError, match="--max-ranks 4"):
        plan_node(replace(options, node_rank=None, master_addr=None), placement)


@pytest.mark.parametrize(
    ("nproc", "own", "threads", "expected"),
    [(2, None, None, "4"), (16, None, None, "1"), (2, "3", None, "3"), (2, "3", 5, "5"), (1, None, None, None)],
)
def test_threads(nproc: int, own: str | None, threads: int | None, expected: str | None) -> None:
    layout = lay_out_node(nproc_per_node=nproc, nnodes=1, node_rank=0, master_addr=None, master_port=None)
    inherited = {} if own is None else {"OMP_NUM_THREADS": own}
    plans = plan_ranks(layout, _ALL_REDUCE, inherited, token="t", scheduler=None, threads=threads, cores=8)
    assert {plan.environment.get("OMP_NUM_THREADS") for plan in plans} == {expected}


def test_servers_and_replicas_are_reported() -> None:
    layout = lay_out_node(nproc_per_node=1, nnodes=1, node_rank=0, master_addr=None, master_port=None)
    choice = choose_strategy("mirrored", processes=1, replicas=3)
    (plan,) = plan_ranks(layout, choice, {}, token="t", scheduler="tcp://h:1", threads=None, cores=8)
    assert plan.environment["PACELINE_REPLICAS"] == "3"
    assert plan.environment["PACELINE_SCHEDULER"] == "tcp://h:1"
    choice = choose_strategy("hybrid", processes=1, servers=2, replicas=1)
    (plan,) = plan_ranks(layout, choice, {}, token="t", scheduler="tcp://h:1", threads=None, cores=8)
    assert "PACELINE_REPLICAS" not in plan.environment  # in this strategy, servers have the replicas


def test_filters_are_reported() -> None:
    layout = lay_out_node(nproc_per_node=1, nnodes=1, node_rank=0, master_addr=None, master_port=29500)
    outer = {"PACELINE_FILTERS": "top-k:1", "PACELINE_PULL_FILTERS": "zstd"}
    for filters, pulled in (("quantize:4", "none"), (None, None)):
        (plan,) = plan_ranks(
            layout, _ALL_REDUCE, outer, token="t", scheduler=None, threads=None, cores=8,
            filters=filters, pull_filters=pulled,
        )  # fmt: skip
        variables = environment(plan.environment)
        assert (variables.filters, variables.pull_filters) == (filters, pulled)


@pytest.mark.parametrize(
    ("strategy", "filters", "message"),
    [
        ("one-device", "quantize:4", "strategy one-device runs in one process"),
        ("parameter-server", "top-k:0.1", "top-k:0.1 is for sparse tables"),
        ("all-reduce", "compress", "compress:1 is not for gradients"),
        ("all-reduce", "no_such_module:Signs", "module 'no_such_module' does not exist"),
    ],
)
def test_impossible_filters_are_rejected(strategy: str, filters: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_script(RunOptions(script=__file__, strategy=strategy, filters=filters))
    if strategy == "all-reduce":
        with pytest.raises(UsageError, match="--pull-filters none: all-reduce has no embeddings on servers"):
            run_script(RunOptions(script=__file__, strategy=strategy, pull_filters="none"))
        with pytest.raises(UsageError, match="bits must be a number, got '4/zstd'"):
            run_script(RunOptions(script=__file__, strategy=strategy, filters="quantize:4/zstd"))


_SIGNS = """
import dataclasses
from paceline.filters.base import ValueFilter

@dataclasses.dataclass(frozen=True)
class Signs(ValueFilter):
    share: float = 0.5
    name, preserves = "signs", "nothing"
    num_bytes = encode = decode = None
"""


@pytest.mark.parametrize(
    ("strategy", "given", "expected"),
    [
        ("all-reduce", "none", None),
        ("one-device", "none", None),
        ("all-reduce", "user_signs:Signs:0.25", "user_signs:Signs:0.25"),
        ("all-reduce", "top-k:0.125, signs:0.25", "top-k:0.125,user_signs:Signs:0.25"),
    ],
)
def test_filters_are_passed_in_an_importable_form(
    strategy: str, given: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_signs.py").write_text(_SIGNS)
    script = tmp_path / "script.py"
    script.write_text("import os; open('received', 'w').write(str(os.environ.get('PACELINE_FILTERS')))")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = FilterModuleFlags(filter_module=[] if given == "none" else ["user_signs"])
    options = RunOptions(script=str(script), strategy=strategy, filters=given, filter_modules=flags)
    try:
        assert run_script(options) == 0
    finally:
        FILTERS.pop("signs", None)
        sys.modules.pop("user_signs", None)
    assert (tmp_path / "received").read_text() == str(expected)


def test_servers_are_assigned_round_robin() -> None:
    assert [servers_of_node(5, 3, node) for node in range(3)] == [(0, 3), (1, 4), (2,)]
    assert servers_of_node(1, 2, 1) == ()


def test_a_described_cluster() -> None:
    text = '{"server": ["a:1", "[::1]:2"], "worker": ["a:3", "b:3", "a:4"]}'
    cluster = parse_cluster(text, "c.json")
    assert [place.netloc for place in cluster.servers] == ["a:1", "[::1]:2"]
    layout = lay_out_worker(cluster, 2)
    assert (layout.ranks, layout.local_ranks, layout.local_world_size, layout.world_size) == ((2,), (1,), 2, 3)
    assert (layout.master_addr, layout.master_port) == ("a", 3)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([], "holds list"),
        ({}, "has no worker"),
        ({"server": ["a:1"]}, "has no worker"),
        ({"ps": ["a:1"], "worker": ["a:2"]}, '"ps" is "server" here'),
        ({"cluster": {"worker": ["a:2"]}, "task": {}}, 'pass the object under "cluster"'),
        ({"workers": ["a:2"]}, "has a job 'workers'"),
        ({"worker": "a:2"}, "expected a list of addresses"),
        ({"worker": {"0": "a:2"}}, "expected a list of addresses"),
        ({"worker": ["a"]}, "has 'a' for worker 0: expected host:port"),
        ({"worker": ["a:1", "b:0"]}, "has 'b:0' for worker 1"),
        ({"worker": ["a:99999"]}, "has 'a:99999' for worker 0"),
        ({"worker": ["unix:///x"]}, "expected host:port"),
        ({"worker": [3]}, "has 3 for worker 0"),
        ({"server": ["a:1"], "worker": ["b:1", "a:1"]}, "has the address a:1 twice, for server 0 and worker 1"),
    ],
)
def test_errors_of_a_cluster_description_are_reported(found: Any, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cluster(json.dumps(found), "c.json")
    assert problem in str(caught.value)
    assert str(caught.value).startswith("c.json ")


def test_invalid_json_is_reported() -> None:
    with pytest.raises(UsageError, match=r"^c\.json is not valid JSON"):
        parse_cluster("{server: []}", "c.json")
