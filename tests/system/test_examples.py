"""The examples for PyTorch with little data: each file runs with several strategies."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.docs.files import TRAIN
from tests.warm.processes import RANKS

from .running import Commands, parse_json

torch = pytest.importorskip("torch")

_PRINT_HELD = """
parts = [getattr(parameter, "to_local", lambda: parameter)() for parameter in model.parameters()]
print(f"rank {strategy.rank} holds {sum(int(part.isfinite().sum()) for part in parts)}", flush=True)
"""
EXAMPLES = Path(__file__).parents[2] / "examples"


def checked(text: str, *fields: str) -> dict[str, Any]:
    """Return the JSON object that an example prints."""
    found = parse_json(text)
    assert found.keys() == {*fields, "seconds", "examples_per_s"}
    assert 0.0 < found["seconds"] < 60.0
    assert found["examples_per_s"] > 0.0
    return found


@pytest.fixture
def run_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run an example in this process, without a launcher. Another process would need seconds to import torch."""
    for name in ("RANK", "WORLD_SIZE", "PACELINE_STRATEGY", "PACELINE_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(script: str, *arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")

    yield run
    torch.set_num_threads(before)


def run_under(
    paceline: Commands, strategy: str, launch: tuple[str, ...], script: str, *arguments: str | Path, field: str
) -> dict[str, Any]:
    """Run an example under a strategy; return the output of rank 0."""
    # When torch is imported, it creates a folder for its compiled code.
    paceline.environment["TORCHINDUCTOR_CACHE_DIR"] = str(paceline.folder / "cache")
    paceline.environment[RANKS] = "torch"
    options = ("--strategy", strategy, "--threads", "1", *launch)
    finished = paceline.succeed("run", *options, EXAMPLES / script, "--json", *arguments)
    assert finished.err == "", finished.err
    return checked(finished.out.removeprefix("[rank 0] "), *field.split())


def test_mnist(
    paceline: Commands,
    run_alone: Any,
    real_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("--data", real_data / "mnist", "--model", "mlp", "--limit", "2000", "--epochs", "2", "--save")
    run_alone("mnist.py", *arguments, tmp_path / "alone", "--batch-size", "64", "--json")
    alone = checked(capsys.readouterr().out, "accuracy")
    assert alone["accuracy"] > 0.8
    monkeypatch.setenv("PACELINE_STRATEGY", "mirrored")
    monkeypatch.setenv("PACELINE_REPLICAS", "2")
    run_alone("mnist.py", *arguments, tmp_path / "mirrored", "--batch-size", "64", "--json")
    mirrored = checked(capsys.readouterr().out, "accuracy")
    launch = ("--nproc-per-node", "2", "--servers", "1")
    common = (*arguments, tmp_path / "served", "--batch-size", "32")
    served = run_under(paceline, "parameter-server", launch, "mnist.py", *common, field="accuracy")
    for found in (mirrored, served):
        # The batches are the same. At most 4 images of 2,000 differ, because sums have another order.
        assert found["accuracy"] == pytest.approx(alone["accuracy"], abs=0.002)
    assert all((tmp_path / name / "manifest.json").exists() for name in ("alone", "mirrored", "served"))


def test_click(paceline: Commands, run_alone: Any, real_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--data", real_data / "criteo" / "train.tsv.gz", "--limit", "12000", "--batch-size")
    run_alone("click.py", *arguments, "512", "--json")
    alone = checked(capsys.readouterr().out, "auc", "log_loss")
    assert 0.6 < alone["auc"] < 0.8
    assert 0.4 < alone["log_loss"] < 0.65
    launch = ("--nproc-per-node", "2", "--servers", "1", "--consistency", "sequential")
    found = run_under(paceline, "hybrid", launch, "click.py", *arguments, "256", field="auc log_loss")
    # The batches of two ranks together equal the batches of one process in the order of the file, except at the end.
    assert found["auc"] == pytest.approx(alone["auc"], abs=0.005)
    assert found["log_loss"] == pytest.approx(alone["log_loss"], abs=0.005)


@pytest.mark.thorough
def test_charlm(paceline: Commands, run_alone: Any, real_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = real_data / "text" / "tinyshakespeare.txt"
    arguments = ("--data", text, "--limit", "30000", "--length", "32", "--batch-size")
    run_alone("charlm.py", *arguments, "16", "--json")
    alone = checked(capsys.readouterr().out, "loss")
    assert 1.5 < alone["loss"] < 3.3  # in nats; the logarithm of 60 characters is 4.1
    found = run_under(paceline, "sharded", ("--nproc-per-node", "2"), "charlm.py", *arguments, "8", field="loss")
    assert found["loss"] == pytest.approx(alone["loss"], abs=0.02)


def test_charlm_learns_a_periodic_text(run_alone: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("abcdefgh" * 1000)
    sizes = ("--limit", "6000", "--length", "16", "--width", "32", "--batch-size", "8", "--epochs", "2")
    run_alone("charlm.py", "--data", tmp_path / "text", *sizes, "--json")
    assert checked(capsys.readouterr().out, "loss")["loss"] < 1.0  # in nats; the logarithm of 8 characters is 2.1


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ("pipeline --stages 2 --split encoder.layers.5 --schedule 1f1b --microbatches 4", [360, 243]),
        ("sharded --nproc-per-node 2 --shard encoder.layers.*,head", [306, 297]),
        ("sharded --nproc-per-node 2 --data-parallel 2", [603, 603]),
    ],
)
def test_the_documented_script_under_options_of_strategies(paceline: Commands, options: str, held: list[int]) -> None:
    """Each rank holds the parameters that the options give it. The others of a pipeline read as NaN."""
    (paceline.folder / "train.py").write_text(TRAIN + _PRINT_HELD)
    paceline.environment["TORCHINDUCTOR_CACHE_DIR"] = str(paceline.folder / "cache")
    paceline.environment[RANKS] = "torch"
    out = paceline.succeed("run", "--strategy", *options.split(), "--threads", "1", "train.py").out
    assert sorted(re.findall(r"rank (\d) holds (\d+)", out)) == [(str(rank), str(n)) for rank, n in enumerate(held)]


def test_mesh(paceline: Commands) -> None:
    paceline.environment[RANKS] = "torch"
    finished = paceline.succeed("run", "--nproc-per-node", "4", EXAMPLES / "mesh.py", "--steps", "3", "--width", "8")
    losses = re.findall(r"step (\d+): loss \d\.\d+\n", finished.out)
    assert losses == ["3"]
    assert "1,136 parameters, of which this process holds 296\n" in finished.out


@pytest.mark.parametrize("script", ["mnist.py", "click.py", "charlm.py"])
def test_missing_data(run_alone: Any, script: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_alone(script, "--data", "nowhere")
    message = ended.value.code  # the script prints a message and ends with status 1
    assert isinstance(message, str)
    assert message.startswith(f"{script}: ")
    assert "nowhere" in message
    assert "\n" not in message


def test_digits(run_alone: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, which has the images, is not installed: it is for the demo")
    run_alone("digits.py", "--json")
    assert checked(capsys.readouterr().out, "accuracy")["accuracy"] > 0.95
