"""Each option of ``paceline train``: accepted by both solvers, or rejected by one."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.solver import OF_BLOCKS, OF_MINIBATCHES
from paceline.cli.train import train

_OF_BOTH = """
data evaluation model format label positive categorical numeric numeric_scale epochs servers workers solver
consistency replicas min_replicas non_finite l1 l2 weight class_weight keep_negatives filters save feature_names cache
strict json quiet heartbeat_timeout scheduler token_file tls_cert tls_key tls_ca metrics metrics_file tensorboard
dashboard report timeline timeline_steps
filter_module dim factor_lr factor_l1 factor_l2 factor_min_count hidden cross_layers tower_lr tower_l1 tower_l2
classes context memory_limit spill_dir text ignore header max_malformed
"""


def test_every_option_is_assigned_to_its_solvers() -> None:
    """Each option is for both solvers, for proximal blocks only, or for minibatches only."""
    options = set(inspect.signature(train).parameters)
    assert options == set(_OF_BOTH.split()) | set(OF_BLOCKS) | set(OF_MINIBATCHES)
    assert not set(OF_BLOCKS) & set(OF_MINIBATCHES)


_VALUES = {
    "tune": [],
    "progressive": [],
    "auto_resume": [],
    "update": ["sgd"],
    "validation": ["rows.svm"],
    "stale": ["drop:2"],
}
"""Values for options that do not accept the number 1."""


@pytest.mark.parametrize("name", [*OF_MINIBATCHES, *OF_BLOCKS])
def test_options_of_the_other_solver_are_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one sentence that names the option. It appears before the command opens a file or cluster."""
    option = "--" + name.replace("_", "-")
    solver = "minibatches" if name in OF_BLOCKS else "proximal-blocks"
    (tmp_path / "rows.svm").write_text("1 7:1\n0 8:1\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["rows.svm", "--scheduler", "127.0.0.1:1", "--solver", solver, option, *_VALUES.get(name, ["1"])]
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr().err
    assert (ended.value.code, output.count("\n")) == (2, 1), output
    if name in OF_BLOCKS:
        assert f"{option}: only for --solver proximal-blocks" in output
    else:
        assert output == f"paceline: {option} does not apply to --solver proximal-blocks: {OF_MINIBATCHES[name]}\n"
