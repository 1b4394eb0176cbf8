"""``paceline run --on ray`` with a small model of Ray. ``system/test_engines.py`` has the conformance suite."""

from __future__ import annotations

import importlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.launch.fake_ray import FakeRay, RayError, fake_ray, without_ray

from paceline.cli import main
from paceline.errors import PeerError, UsageError
from paceline.launch.engines.engine import RunEnd, RunRole
from paceline.launch.engines.manifests import PodOptions
from paceline.launch.engines.options import EngineFlags
from paceline.launch.engines.ssh_host import HostRequest

MODULE = "paceline.launch.engines.ray"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    with fake_ray([2, 2]) as fake:
        for name in ("POLL_S", "_NOTE_S", "Ray.retry_s"):
            monkeypatch.setattr(f"{MODULE}.{name}", 0.05)
        yield fake


def make_engine(**flags: Any) -> Any:
    return importlib.import_module(MODULE).Ray(EngineFlags(**flags))


def make_role(name: str = "ranks", **options: Any) -> RunRole:
    return RunRole(**{"name": name, "command": ("true",), "num_nodes": 2, "num_cpus": 1, **options})


def run(engine: Any, *roles: RunRole) -> RunEnd:
    with engine:
        engine.start(roles)
        while (end := engine.poll()) is None:
            pass
    assert isinstance(end, RunEnd)
    return end


def replace_commands(patch: pytest.MonkeyPatch, command: Callable[[int, Callable[[], object]], int]) -> list[int]:
    """Replace the commands by calls with the number of the node and a function that waits for the request to end.

    Return the list of the numbers of all calls.
    """
    numbers: list[int] = []

    def run_command(request: HostRequest, wait_end: Callable[..., float], **_: Any) -> int:
        number = json.loads(request.variables["PACELINE_PLACEMENT"])["launcher"]
        numbers.append(number)
        endless = SimpleNamespace(is_alive=lambda: True)
        return command(number, lambda: wait_end(None, endless))

    patch.setattr(f"{MODULE}.run_command", run_command)
    return numbers


def test_nodes_have_the_resources_of_their_roles(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[list[dict[str, float]]] = []

    def record(*_: object) -> int:
        requested.extend(ray.groups)
        return 0

    replace_commands(monkeypatch, record)
    ray.num_cpus = [8]
    engine = make_engine(pods=PodOptions(gpus=2))
    roles = make_role("servers", num_nodes=1, num_cpus=3), make_role(num_cpus=2)
    assert run(engine, *roles) == RunEnd(0, None)
    assert requested[0] == [{"CPU": 5, "GPU": 2}, {"CPU": 2, "GPU": 2}]
    assert ray.groups == []


def test_a_lost_node_ends_the_run(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(number: int, wait_end: Callable[[], object]) -> int:
        if number == 0:
            raise RayError("a traceback\n\tthe node died.\n")
        wait_end()
        return 143

    replace_commands(monkeypatch, lose)
    end = run(make_engine(), make_role(is_elastic=True))
    assert end.status == 1
    assert end.reason is not None
    assert "10.0.0.1" in end.reason
    assert ": the node died; the other nodes were ended" in end.reason
    assert ray.groups == []


def test_an_elastic_run_continues_without_a_node_and_starts_it_again(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    is_back = threading.Event()

    def lose_once(number: int, _: Callable[[], object]) -> int:
        if numbers.count(1) == 2:
            is_back.set()
        elif number == 1:
            raise RayError("the node died")
        assert is_back.wait(20)
        return 0

    numbers = replace_commands(monkeypatch, lose_once)
    assert run(make_engine(), make_role(is_elastic=True)) == RunEnd(0, None)
    assert sorted(numbers) == [0, 1, 1]
    assert len(ray.killed) == 1
    assert "the node died; the other nodes continue" in capfd.readouterr().err


def test_an_elastic_run_grows_with_the_cluster(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    has_joined = threading.Event()
    most_groups: list[int] = []

    def join(number: int, _: Callable[[], object]) -> int:
        most_groups.append(len(ray.groups))
        if number < 2:
            ray.add_node(1)
        elif number == 2 and numbers.count(2) == 1:
            raise RayError("the node died")
        else:
            has_joined.set()
        assert has_joined.wait(20)
        return 0

    numbers = replace_commands(monkeypatch, join)
    monkeypatch.setattr(f"{MODULE}.MOST_REQUESTS", 1)
    ray.num_cpus = [1]
    assert run(make_engine(), make_role(num_nodes=1, is_elastic=True, num_more=3)) == RunEnd(0, None)
    assert numbers == [0, 1, 2, 2]
    assert max(most_groups) == 4, "further requests wait for the first one"
    assert ray.groups == []


def test_a_node_that_joins_at_the_end(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends although the new node waits for the first node."""
    monkeypatch.setattr("paceline.launch.engines.node_processes.LAST_S", 0.1)
    has_started = threading.Event()

    def wait(number: int, wait_end: Callable[[], object]) -> int:
        if number == 0:
            assert has_started.wait(20)
            return 0
        has_started.set()
        wait_end()
        return 75

    replace_commands(monkeypatch, wait)
    assert run(make_engine(), make_role(num_nodes=1, is_elastic=True, num_more=1)) == RunEnd(0, None)
    assert ray.groups == []


def test_a_wrong_folder_is_a_reason(ray: FakeRay, tmp_path: Path) -> None:
    end = run(make_engine(), make_role(files=(str(tmp_path / "missing.py"),)))
    assert end.status == 1
    assert end.reason is not None
    assert "missing.py" in end.reason


def test_missing_resources(ray: FakeRay, capfd: pytest.CaptureFixture[str]) -> None:
    shortage = "2 x 3 CPU requested, 4 existing, 4 free, 2 on the largest node"
    with pytest.raises(PeerError, match=shortage):
        run(make_engine(queue_timeout=0.2), make_role(num_cpus=3))
    assert capfd.readouterr().err.count(shortage) == 1
    assert ray.groups == []


def test_no_wait_exceeds_the_queue_timeout(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(nodes: object, timeout_s: float) -> bool:
        waits.append(timeout_s)
        time.sleep(timeout_s)
        return False

    monkeypatch.setattr("paceline.launch.engines.ray_nodes.RayNodes.wait_reserved", wait)
    monkeypatch.setattr(f"{MODULE}._NOTE_S", 0.08)
    with pytest.raises(PeerError, match=r"--queue-timeout 0\.1 has passed"):
        run(make_engine(queue_timeout=0.1), make_role())
    assert sum(waits) == pytest.approx(0.1, abs=0.02)


def test_no_cluster_answers(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UsageError, match=r"RAY_ADDRESS=127\.0\.0\.1:1"):
        run(make_engine(), make_role())

    def fail(**_: Any) -> None:
        raise ConnectionError("no instance.")

    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(UsageError, match=r"no instance\. Run ray start"):
        run(make_engine(), make_role())


@pytest.mark.parametrize(
    ("reply", "reason"),
    [(b"", "the server there is not Ray"), (b"HTTP/1.1 400", "the server there is not Ray"), (None, "timed out")],
)
def test_another_server_at_the_address(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, reply: bytes | None, reason: str
) -> None:
    monkeypatch.setattr("paceline.launch.engines.ray_nodes._CONNECT_S", 0.2)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would retry for minutes"))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                if reply is not None:
                    connection.recv(100)
                    connection.sendall(reply)
                else:
                    connection.recv(1000)
                    connection.recv(1000)  # until the client has closed the connection

        threads.submit(answer)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UsageError, match=reason):
            run(make_engine(), make_role())


def test_the_handler_of_sigterm_remains(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(*_: object) -> None:
        pass

    def init(**_: Any) -> None:
        ray.is_started = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the real Ray replaces it

    monkeypatch.setattr(ray, "init", init)
    replace_commands(monkeypatch, lambda *_: 0)
    before = signal.signal(signal.SIGTERM, handle)
    try:
        assert run(make_engine(), make_role()) == RunEnd(0, None)
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)


def run_command(patch: pytest.MonkeyPatch, *words: str) -> int:
    options = ["--nodes", "2", "--nproc-per-node", "3", "--servers", "1", "--gpus", "1"]
    patch.setattr(sys, "argv", ["paceline", "run", "--on", "ray", *options, *words, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert run_command(monkeypatch, "--dry-run") == 0
    text = capfd.readouterr().out
    assert "# node 0: 4 CPU, 1 GPU\n" in text  # three ranks and a server
    assert "# node 1: 3 CPU, 1 GPU\n" in text
    assert text.count("--threads 1") == 3
    assert run_command(monkeypatch, "--dry-run", "--min-ranks", "1", "--max-ranks", "13") == 0
    text = capfd.readouterr().out
    assert "# up to 2 more nodes, when Ray has resources\n" in text
    assert [line.rpartition("# ")[2] for line in text.splitlines() if "--max-ranks 13" in line] == ["ranks"] * 2
    assert run_command(monkeypatch, "--namespace", "n") == 2
    assert "--namespace is for --on kubernetes" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    with without_ray():
        assert run_command(monkeypatch) == 2
    assert "pip install 'paceline[ray]'" in capfd.readouterr().err
