"""Elastic all-reduce: ranks are killed and replaced while the others train, without a restart."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from tests.warm.processes import RANKS

from .elastic_training import TRAIN, check_items, ends
from .running import Commands, Finished

_COUNT = """
import itertools, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import paceline.torch as pt
from paceline.collectives.elastic import ElasticGroup
from paceline.errors import CollectiveError

num_items, victims, last, num_epochs = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], int(sys.argv[4])
recovers_at = int(sys.argv[5]) if sys.argv[5:6] not in ([], ["loses_vote"]) else 0
incarnation = os.environ["PACELINE_INCARNATION"]
strategy = pt.strategy(bucket_mb=0.0001)

class Counts(nn.Module):  # with SGD, each weight counts in how many means its sample was
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1, dtype=torch.float64) for _ in range(num_items))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))

    def forward(self, numbers):
        if self.training:
            self.mean += 1.0
            self.wide += 1.0
        return torch.cat(list(self.weights))[numbers]

model = Counts()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
num_steps = num_batches = num_small = 0

def count(*_):
    global num_steps
    num_steps += 1

optimizer.register_step_post_hook(count)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
loader = torch.utils.data.DataLoader(torch.arange(num_items), batch_size=4, shuffle=True, num_workers=0)
model, optimizer, loader, scheduler = strategy.prepare(model, optimizer, loader, scheduler)

def die(_):  # the exchange of the other weights has begun
    if incarnation in victims and num_batches >= 7:
        os.kill(os.getpid(), signal.SIGKILL)

strategy.module.weights[1].register_hook(die)

def vote(group, *given, **options):  # one rank loses the result of the vote of the eighth batch, and another rank dies
    original_vote(group, *given, **options)
    if num_batches == 8 and incarnation == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if num_batches == 8 and incarnation == "1" and group.size == 3:
        raise CollectiveError("the result of the vote is lost")

original_vote = ElasticGroup._vote
if "loses_vote" in sys.argv:
    ElasticGroup._vote = vote
print("starts", incarnation, len(loader), flush=True)
for epoch in itertools.count():
    for numbers in loader:
        num_batches += strategy.has_joined
        time.sleep(0.02 + 0.5 * (incarnation == "1" and os.path.exists("slow")))
        num_small += strategy.has_joined and strategy.world_size == 2
        if num_small == recovers_at:
            Path("slow").unlink(missing_ok=True)
        optimizer.zero_grad()
        model(numbers).mean().backward()
        optimizer.step()
        scheduler.step()
        if strategy.has_joined and incarnation == last and (num_small > 20 or not os.path.exists("slow")):
            Path("done").touch()
    if strategy.has_joined and strategy.reduce(float(epoch + 1 >= num_epochs and os.path.exists("done")), "min"):
        break
values = [-weight.item() for weight in strategy.module.weights]
steps = [num_steps, scheduler.last_epoch]
print("ends", incarnation, epoch + 1, min(values), max(values), *steps, strategy.module.mean.tolist(), flush=True)
print("values", sorted({round(value, 6) for value in values}), flush=True)
"""

_BALANCE = """
import statistics, sys, time
import torch
from torch import nn
import paceline.torch as pt

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)

strategy = pt.strategy()
torch.manual_seed(0)
model = nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(320, 3, generator=torch.Generator().manual_seed(1)).double()
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
is_stream = "stream" in sys.argv
loader = torch.utils.data.DataLoader(Stream() if is_stream else data, batch_size=32, shuffle=not is_stream)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
rank, times, num_samples = strategy.rank, [], []
for epoch in range(4):
    for inputs, targets in loader:
        begun_s = time.monotonic()
        time.sleep(len(inputs) * (0.006 if rank else 0.002))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        times.append(time.monotonic() - begun_s)
        num_samples.append(len(inputs))
print("time", rank, statistics.median(times[-10:]), sum(num_samples[-10:]), len(times), flush=True)
print("weights", rank, *strategy.module.weight.reshape(-1).tolist(), flush=True)
"""


@pytest.fixture
def elastic(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands whose ranks are forked from a process that has imported torch."""
    paceline.environment[RANKS] = "torch"
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "count.py").write_text(_COUNT)
    (tmp_path / "balance.py").write_text(_BALANCE)
    return paceline


def run(elastic: Commands, num_ranks: int, victims: str, last: int, min_ranks: int = 1) -> Finished:
    """Train; `victims` are the incarnations to kill, and the member `last` must join before the end."""
    options = ["--min-ranks", str(min_ranks), "--nproc-per-node", str(num_ranks)]
    return elastic.run("run", "--strategy", "all-reduce", *options, "train.py", victims, str(last))


def test_the_survivors_of_a_killed_rank_continue_and_a_new_rank_joins(elastic: Commands, tmp_path: Path) -> None:
    undisturbed = run(elastic, 3, "", 2)
    assert undisturbed.status == 0, undisturbed
    for path in [tmp_path / "done", *tmp_path.glob("items*")]:
        path.unlink()
    finished = run(elastic, 3, "1", 3)
    assert finished.status == 0, finished
    assert "rank 1 was killed by SIGKILL" in finished.err
    last = ends(finished)
    assert last.keys() == {0, 2, 3}
    assert len(set(last.values())) == 1, "the ranks differ"
    assert [finished.out.count(f"starts {incarnation} ") for incarnation in (0, 2)] == [1, 1], "restarted"
    check_items(tmp_path)
    losses = [float(next(iter(ends(run).values()))[1]) for run in (undisturbed, finished)]
    assert losses[1] < max(2 * losses[0], 0.05), losses


@pytest.mark.thorough
def test_ranks_are_repeatedly_killed_during_an_all_reduce(elastic: Commands, tmp_path: Path) -> None:
    finished = run(elastic, 3, "0,2,3,4,5", 6)
    assert finished.status == 0, finished
    assert finished.err.count("was killed by SIGKILL") >= 4
    last = ends(finished)
    assert 6 in last
    assert 1 in last
    assert len(set(last.values())) == 1, "the ranks differ"
    check_items(tmp_path)


@pytest.mark.parametrize(
    ("victims", "last"),
    [
        pytest.param("", "2", marks=pytest.mark.thorough),
        ("1,3", "4"),
        pytest.param("0,2,3,4", "5", marks=pytest.mark.thorough),
    ],
)
def test_each_sample_is_used_once_in_steps_of_constant_size(elastic: Commands, victims: str, last: str) -> None:
    """A step has 24 samples: two batches on each of three ranks, three batches on two ranks, or six on one rank."""
    options = ["--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "3", "--global-batch", "24"]
    options += ["--snapshot-dir", "snapshots", "--snapshot-every", "1ms"] if victims == "1,3" else []
    finished = elastic.run("run", *options, "count.py", "120", victims, last, "4")
    assert finished.status == 0, finished
    assert finished.err.count("was killed by SIGKILL") == len(victims.split(",")) - (not victims)
    found = re.findall(r"ends (\d+) (\d+) (\S+) (\S+) (\d+) (\d+) \[(\S+),", finished.out)
    assert len(found) == 3
    for member, epochs, least, most, steps, schedule, _ in found:
        # Each mean is over 24 samples, so each sample changes its weight by 1/24 in each epoch.
        assert float(least) == pytest.approx(int(epochs) / 24, rel=1e-9)
        assert float(most) == pytest.approx(int(epochs) / 24, rel=1e-9)
        assert int(schedule) == 5 * int(epochs)
        if int(member) < 3:
            assert int(steps) == 5 * int(epochs)
    assert len({buffer for *_, buffer in found}) == 1


def test_a_slow_rank_gets_fewer_samples_of_the_same_step(elastic: Commands) -> None:
    times: list[float] = []
    weights: list[list[float]] = []
    for options in ([], ["--balance"]):
        ranks = ["--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "2", "--global-batch", "32"]
        finished = elastic.run("run", *ranks, *options, "balance.py")
        assert finished.status == 0, finished
        found = re.findall(r"time (\d) (\S+) (\d+) 40", finished.out)
        assert len(found) == 2, finished
        samples = {int(rank): int(number) for rank, _, number in found}
        assert sum(samples.values()) == 320
        assert (samples[0] > 1.5 * samples[1]) == bool(options), samples
        assert ("; samples: " in finished.err) == bool(options), finished.err
        times.append(max(float(time_s) for _, time_s, _ in found))
        weights += [list(map(float, line.split())) for line in re.findall(r"weights \d (.*)", finished.out)]
    assert times[1] < 0.8 * times[0], times
    assert len(weights) == 4
    assert all(values == pytest.approx(weights[0], rel=1e-9) for values in weights), weights


def test_the_samples_of_a_stream_are_not_balanced(elastic: Commands) -> None:
    ranks = ["--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "2", "--global-batch", "64"]
    finished = elastic.run("run", *ranks, "--balance", "balance.py", "stream")
    assert finished.status == 1, finished
    assert "--balance: not supported with a stream" in finished.err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.thorough),
        pytest.param(["--global-batch", "24"], marks=pytest.mark.thorough),
        ["--global-batch", "24", "--balance"],
    ],
)
def test_a_slow_rank_is_left_out_until_it_has_recovered(elastic: Commands, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "slow").touch()
    ranks = ["--strategy", "all-reduce", "--min-ranks", "2", "--nproc-per-node", "3", "--drop-stragglers", "5"]
    finished = elastic.run("run", *ranks, *options, "count.py", "120", "", "1", "2", "5")
    assert finished.status == 0, finished
    assert "rank 1 is left out, because its steps take" in finished.err, finished.err
    assert "rank 1 has recovered, and takes part again as rank 2" in finished.err, finished.err
    assert re.search(r"epoch \d+: computing time of a step, by rank: \S+ ms, \S+ ms", finished.err), finished.err
    found = re.findall(r"ends (\d+) (\d+) (\S+) (\S+) \d+ (\d+) \[(\S+),", finished.out)
    assert len({each[1:] for each in found}) == 1, "the ranks differ"
    assert len(found) == 3
    for _, epochs, least, most, *_ in found if options else ():
        assert float(least) == pytest.approx(int(epochs) / 24, rel=1e-9)
        assert float(most) == pytest.approx(int(epochs) / 24, rel=1e-9)


def test_a_rank_that_stays_slow_ends_with_the_other_ranks(elastic: Commands, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    ranks = ["--strategy", "all-reduce", "--min-ranks", "2", "--nproc-per-node", "3", "--drop-stragglers", "5"]
    finished = elastic.run("run", *ranks, "count.py", "120", "", "0", "2", "-1")
    assert finished.status == 0, finished
    assert "rank 1 is left out, because its steps take" in finished.err, finished.err
    assert "the training ended before this rank could take part" in finished.err, finished.err
    assert {int(member) for member in re.findall(r"ends (\d+)", finished.out)} == {0, 2}


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.thorough), ["--global-batch", "24"]])
def test_a_rank_dies_after_a_vote_that_another_rank_loses(elastic: Commands, options: list[str]) -> None:
    ranks = ["--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "3", *options]
    finished = elastic.run("run", *ranks, "count.py", "120", "", "3", "4", "loses_vote")
    assert finished.status == 0, finished
    assert "was killed by SIGKILL" in finished.err
    found = re.findall(r"ends (\d+) (\d+) (\S+) (\S+) (\d+) (\d+) \[(\S+),", finished.out)
    assert len(found) == 3
    assert len({each[1:4] for each in found}) == 1, "the ranks differ"
    for _, epochs, least, most, *_ in found if options else ():
        assert float(least) == pytest.approx(int(epochs) / 24, rel=1e-9)
        assert float(most) == pytest.approx(int(epochs) / 24, rel=1e-9)


def test_gradients_are_the_mean_over_samples(elastic: Commands) -> None:
    """Two ranks have 11 samples: a step of 4 and 4 samples, and then a step of 2 samples and 1 sample."""
    options = ["--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "2"]
    finished = elastic.run("run", *options, "count.py", "11", "", "1", "1")
    assert finished.status == 0, finished
    assert finished.out.count(f"values {[0.125, round(1 / 3, 6)]}") == 2, finished.out


def test_too_few_ranks_end_the_run(elastic: Commands) -> None:
    finished = run(elastic, 3, "1,2", 9, min_ranks=2)
    assert finished.status == 1
    assert "1 rank is left, and --min-ranks is 2" in finished.err or "no rank is left" in finished.err


def test_a_failing_script_ends_the_run_with_the_traceback(elastic: Commands, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import paceline.torch as pt\npt.strategy()\nraise ValueError('a defect')\n")
    finished = run(elastic, 2, "", 0)
    assert finished.status == 1
    assert "ValueError: a defect" in finished.err


def test_a_state_that_one_rank_has_not_registered(elastic: Commands, tmp_path: Path) -> None:
    call = "    strategy.register_state(name, state)"
    script = TRAIN.replace(call, f"    if incarnation == 0 or name != 'noise':\n    {call}")
    (tmp_path / "train.py").write_text(script)
    finished = run(elastic, 2, "", 0)
    assert finished.status == 1, finished
    assert "rank 1 has not registered the state 'noise', but rank 0 has" in finished.err
    assert "the same traceback as rank" in finished.err


def test_a_stopped_rank_is_replaced(elastic: Commands) -> None:
    ranks = ["--min-ranks", "1", "--nproc-per-node", "2", "--heartbeat-timeout", "1"]
    running = elastic.start("run", "--strategy", "all-reduce", *ranks, "train.py", "", "2")
    psutil.Process(int(running.wait_line("starts 1 ").split()[-1])).send_signal(signal.SIGSTOP)
    finished = running.wait()
    assert finished.status == 0, finished
    assert "rank 1 was stopped for 1 s" in finished.err
    assert ends(finished).keys() == {0, 2}


@pytest.mark.thorough
def test_rank_0_is_killed_from_outside(elastic: Commands) -> None:
    running = elastic.start(
        "run", "--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "2", "train.py", "", "2"
    )
    pid = int(running.wait_line("starts 0 ").split()[-1])
    psutil.Process(pid).send_signal(signal.SIGKILL)
    finished = running.wait()
    assert finished.status == 0, finished
    assert ends(finished).keys() == {1, 2}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--min-ranks", "0"], "--min-ranks 0"),
        (["--min-ranks", "3"], "only 2 ranks"),
        (["--min-ranks", "1", "--strategy", "sharded"], "--snapshot-dir"),
        (["--min-ranks", "1", "--filters", "float16"], "--filters float16"),
        (["--min-ranks", "1", "--max-ranks", "4"], "--master-addr"),
        (["--min-ranks", "1", "--max-ranks", "1"], "--max-ranks 1"),
        (["--max-ranks", "4"], "needs --min-ranks"),
        (["--min-ranks", "1", "--global-batch", "0"], "--global-batch 0"),
        (["--global-batch", "8"], "--global-batch 8"),
        (["--min-ranks", "1", "--balance"], "--balance"),
        (["--balance"], "--balance: needs --min-ranks"),
        (["--min-ranks", "1", "--drop-stragglers", "1"], "--drop-stragglers 1"),
        (["--drop-stragglers", "3"], "--drop-stragglers 3"),
    ],
)
def test_impossible_options(paceline: Commands, tmp_path: Path, options: list[str], named: str) -> None:
    (tmp_path / "train.py").write_text("")
    paceline.environment["PACELINE_TOKEN"] = "a secret of the tests"
    finished = paceline.run("run", "--nproc-per-node", "2", *options, "train.py")
    assert finished.status == 2, finished
    assert named in finished.err
