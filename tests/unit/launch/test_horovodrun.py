"""The options of Horovod's launcher, its configuration file, and the host discovery script, without ranks."""

from __future__ import annotations

import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.command_options import words_of
from paceline.errors import UsageError
from paceline.launch.horovodrun import run
from paceline.launch.horovodrun.config import read_config
from paceline.launch.horovodrun.discovery import HostDiscovery
from paceline.launch.horovodrun.options import HorovodrunOptions, OptionEffect
from paceline.launch.horovodrun.translation import RunTranslation, translate
from paceline.observe.stuck.processes import find_state
from paceline.version import __version__

TRANSLATED = {
    "command", "num_proc", "output_filename", "hosts", "hostfile", "ssh_port", "ssh_identity_file", "min_num_proc",
    "max_num_proc", "reset_limit",
}  # fmt: skip
"""Options that the translation itself translates."""
RUN = {"config_file", "verbose", "version", "check_build", "host_discovery_script", "slots"}
"""Options of the command that the ranks are not concerned with."""


def parse(monkeypatch: pytest.MonkeyPatch, words: str) -> HorovodrunOptions:
    """Return the options of a command line."""
    received: list[HorovodrunOptions] = []

    def receive(options: HorovodrunOptions) -> int:
        received.append(options)
        return 0

    monkeypatch.setattr(run, "run_horovod", receive)
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["paceline", "horovodrun", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    return received[0]


def translated(**options: Any) -> RunTranslation:
    return translate(HorovodrunOptions(**{"command": ["python", "train.py"], "num_proc": 4, **options}), "own")


def test_every_option_has_an_effect() -> None:
    effects: dict[str, OptionEffect | None] = {
        each.name: each.metadata.get("effect") for each in fields(HorovodrunOptions)
    }
    assert {name for name, effect in effects.items() if effect is None} == TRANSLATED | RUN
    for effect in effects.values():
        assert effect is None or [bool(text) for text in (effect.variable, effect.note, effect.error)].count(True) == 1


def test_the_flags_of_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(monkeypatch, "-np 4 -H a:2,b:2 -p 22 -i key --no-stall-check python -u train.py --lr 0.1 -p 3")
    assert (options.num_proc, options.hosts, options.ssh_port, options.ssh_identity_file) == (
        4,
        "a:2,b:2",
        22,
        Path("key"),
    )
    assert options.no_stall_check is True
    assert options.command == ["python", "-u", "train.py", "--lr", "0.1", "-p", "3"]
    options = parse(
        monkeypatch, "--min-np 1 --max-num-proc 3 --blacklist-cooldown-range 6 7 --stall-check --autotune x"
    )
    assert (options.min_num_proc, options.max_num_proc, options.cooldown_range) == (1, 3, (6, 7))
    assert (options.no_stall_check, options.autotune, options.command) == (False, True, ["x"])
    assert words_of(replace(options, no_stall_check=None)) == (
        ["--min-num-proc", "1", "--max-num-proc", "3", "--blacklist-cooldown-range", "6", "7", "--autotune"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--nproc-per-node 4 --no-python"),
        ({"hosts": "own:8"}, "--nproc-per-node 4 --no-python"),
        ({"hosts": "a:3,b:3,c:1"}, "--no-python --hosts a:3,b:1"),
        ({"hosts": "[::2]:4", "ssh_port": 7}, "--no-python --hosts [::2]:4 --ssh-option Port=7"),
        ({"output_filename": Path("out")}, "--nproc-per-node 4 --no-python --log-dir out"),
        ({"min_num_proc": 2, "reset_limit": 0, "hosts": "localhost:6"},
         "--strategy all-reduce --nproc-per-node 6 --min-ranks 2 --max-changes 0 --no-python"),
        ({"min_num_proc": 2, "max_num_proc": 5, "hosts": "a:4,b:4"},
         "--strategy all-reduce --min-ranks 2 --no-python --hosts a:4,b:1"),
    ],
)  # fmt: skip
def test_the_command_of_paceline_run(options: dict[str, Any], words: str) -> None:
    found = translated(**options)
    assert words_of(found.run) == words.split()
    assert (found.run.script, found.run.arguments, found.notes) == ("python", ["train.py"], ())


def test_the_host_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots = 1\n")
    assert words_of(translated(hostfile=file, num_proc=3).run) == ["--no-python", "--hosts", "a:2,b:1"]


def test_variables_and_notes() -> None:
    found = translated(
        fusion_threshold_mb=2, no_stall_check=True, timeline_mark_cycles=False, log_level="INFO", autotune=True,
        torus_allreduce=False, ssh_port=7,
    )  # fmt: skip
    assert found.variables == {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "PYTHONUNBUFFERED": "1",
        "HOROVOD_FUSION_THRESHOLD": "2097152", "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0", "HOROVOD_LOG_LEVEL": "INFO",
    }  # fmt: skip
    assert found.notes == (
        "--autotune is not needed: Paceline tunes its collectives by measurement",
        "ssh's Port=7 is not needed: all ranks are on this machine",
    )
    assert translated(min_num_proc=1).variables["HOROVOD_ELASTIC"] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_proc": None}, "the number of ranks is missing"),
        ({"command": []}, "the program is missing"),
        ({"mpi_args": "-x A"}, "--mpi-args is not supported: Paceline does not use MPI. Leave it out"),
        ({"log_level": "loud"}, "HOROVOD_LOG_LEVEL is 'loud', expected trace"),
        ({"hosts": "a:2,b:1"}, "--num-proc 4: the hosts have 3 slots"),
        ({"hosts": "a:1"}, "--num-proc 4: the hosts have 1 slot. Pass --num-proc 1"),
        ({"min_num_proc": 5}, "--min-num-proc 5: there are only 4 slots"),
        ({"hosts": "a,b"}, "numbers of slots are missing"),
        ({"hosts": "own:2,localhost:2"}, "cannot connect to localhost"),
        ({"hosts": "a:4", "hostfile": Path("h")}, "--hosts and --hostfile both have the hosts"),
        ({"reset_limit": 3}, "--reset-limit is for elastic training"),
        ({"slots": 3, "min_num_proc": 1}, "--slots-per-host 3: needs --host-discovery-script"),
        ({"max_num_proc": 3, "min_num_proc": 1}, "--max-num-proc 3: expected --num-proc (4) or more"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        translated(**options)
    assert message in str(error.value)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_horovod = run.run_horovod
    options = parse(monkeypatch, "-v")
    assert (options.version, options.verbose) == (True, False)
    assert run_horovod(options) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_what_is_available() -> None:
    """Programs search for these lines."""
    lines = run.describe_build().splitlines()
    assert [line for line in lines if "[X]" in line] == ["    [X] PyTorch", "    [X] Gloo", "    [X] Gloo"]
    assert {"Available Frameworks:", "    [ ] MPI", "    [ ] NCCL", "    [ ] TensorFlow"} <= {*lines}


def test_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "controller: gloo\n"
        "params: {fusion_threshold_mb: 32, cycle_time_ms: 3.5, hierarchical_allreduce: false}\n"
        "autotune: {enabled: true, log_file: log.txt}\n"
        "timeline: {filename: t.json, mark_cycles: true}\n"
        "stall_check: {enabled: false, warning_time_seconds: 120}\n"
        "library_options: {gloo_timeout_seconds: 7}\n"
        "logging: {level: INFO}\n"
    )
    found = parse(monkeypatch, f"-np 2 --fusion-threshold-mb 5 --config-file {file} train")
    assert found == HorovodrunOptions(
        command=["train"], num_proc=2, config_file=file, use_gloo=True, fusion_threshold_mb=5, cycle_time_ms=3.5,
        autotune=True, autotune_log_file="log.txt", timeline_filename="t.json", timeline_mark_cycles=True,
        no_stall_check=True, stall_check_warning_time_seconds=120, gloo_timeout_seconds=7, log_level="INFO",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters: {a: 1}", "parameters: {'a': 1} is unknown"),
        ("- a", "is unknown"),
        ("a: [", "cannot read this file"),
    ],
)
def test_wrong_configuration_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match="--config-file") as error:
        read_config(file)
    assert message in str(error.value)


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    """The output of the host discovery script."""
    file = tmp_path / "slots"
    file.write_text("own:1\n\nlocalhost\n")
    return file


def test_the_host_discovery_script(slots: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with HostDiscovery(f"cat {slots}", 2, ("own", "localhost")) as discovery:
        assert discovery.wait(3, 0.0) == 3
        slots.unlink()
        deadline = time.monotonic() + 20.0
        while "The number of ranks stays 3" not in capsys.readouterr().err and time.monotonic() < deadline:
            time.sleep(0.05)
        slots.write_text("own:5")
        while discovery.num_slots == 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert discovery.num_slots == 5


@pytest.mark.parametrize("closes", [False, True])
def test_a_host_discovery_script_that_hangs(closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are killed at the time limit, and if the training ends."""
    pid = tmp_path / "pid"
    monkeypatch.setattr("paceline.launch.horovodrun.discovery._SCRIPT_S", 60.0 if closes else 0.0)
    hangs = f"sleep 600 & echo $! > {pid}; wait"
    with HostDiscovery(f"test -e {tmp_path}/ready && {{ {hangs}; }}; echo own:2", None, ("own",)) as discovery:
        if closes:
            assert discovery.wait(2, 0.0) == 2
        (tmp_path / "ready").touch()
        if closes:
            deadline = time.monotonic() + 20.0
            while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            with pytest.raises(UsageError, match="has not ended within 0 s"):
                discovery.wait(2, 0.0)
        began = time.monotonic()
    assert time.monotonic() - began < 20.0
    while (state := find_state(int(pid.read_text()))) not in ("", "Z") and time.monotonic() < began + 20.0:
        time.sleep(0.05)
    assert state in ("", "Z")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken >&2; exit 3", "ended with status 3: broken"),
        ("echo b:4", "printed 'b:4', but ranks on other hosts cannot be added to a running training"),
        ("echo own", "printed 'own', expected a line such as localhost:4"),
        ("echo own:9999999", "expected a line such as localhost:4"),
        ("printf '\\377:1'", "has printed '\ufffd:1', but ranks on other hosts"),
        ("echo own:1", "has printed 1 slots for 0 s, and --num-proc is 2"),
    ],
)
def test_wrong_host_discovery_scripts(script: str, message: str) -> None:
    with HostDiscovery(script, None, ("own",)) as discovery, pytest.raises(UsageError) as error:
        discovery.wait(2, 0.0)
    assert message in str(error.value)
