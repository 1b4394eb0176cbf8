"""``paceline run --on kubernetes`` on a small API server, whose pods are processes of this machine."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.waiting import wait_until
from tests.warm.processes import RANKS

from paceline.cli import main
from paceline.launch.engines.engine import RunEnd, RunRole
from paceline.launch.engines.kubernetes import Kubernetes
from paceline.launch.engines.kubernetes_api import ClusterApi
from paceline.launch.engines.manifests import PodOptions
from paceline.launch.engines.options import EngineFlags

from .elastic_training import TRAIN, check_items, ends
from .kubernetes_cluster import KubernetesCluster
from .running import Commands

_CONNECT = """
import paceline.collectives as collectives, os
group = collectives.init()
print(os.environ["PACELINE_STRATEGY"], group.size, flush=True)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    cluster = KubernetesCluster(tmp_path)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.config))
    monkeypatch.setattr("paceline.launch.engines.kubernetes._POLL_S", 0.0)
    monkeypatch.setattr("paceline.launch.engines.kubernetes._WAIT_S", 0.1)
    monkeypatch.setattr("paceline.launch.engines.kubernetes._PATIENCE_S", 2.0)
    monkeypatch.setattr("paceline.launch.engines.kubernetes_api._PAUSE_S", 0.05)
    monkeypatch.setattr("paceline.launch.engines.pod_logs._PAUSE_S", 0.05)
    yield cluster
    cluster.close()


def follow(
    program: str,
    *,
    num_nodes: int = 1,
    timeout_s: float | None = None,
    is_elastic: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
    **options: Any,
) -> RunEnd:
    """Run a program in Python on pods."""
    command = (sys.executable, "-uc", program)
    role = RunRole(name="ranks", command=command, num_nodes=num_nodes, num_cpus=1, is_elastic=is_elastic)
    flags = EngineFlags(queue_timeout=timeout_s, pods=PodOptions(image="image", name="demo", **options))
    deadline = time.monotonic() + 60.0
    with Kubernetes(flags) as engine:
        engine.start([role])
        while (end := engine.poll()) is None:
            meanwhile()
            assert time.monotonic() < deadline
    return end


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command in this process; return its status."""
    monkeypatch.setattr("paceline.cli.raise_on_sigterm", lambda: None)
    start = ["paceline", "run", "--on", "kubernetes", "--image", "image", "--name", "demo"]
    monkeypatch.setattr(sys, "argv", [*start, *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code or 0))


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("job", "all-reduce", marks=pytest.mark.thorough),
        ("jobset", "parameter-server"),
        pytest.param("trainjob", "all-reduce", marks=pytest.mark.thorough),
    ],
)
def test_a_script_on_two_pods(paceline: Commands, cluster: KubernetesCluster, kind: str, strategy: str) -> None:
    (cluster.folder / "script.py").write_text(_CONNECT)
    paceline.environment["KUBECONFIG"] = str(cluster.config)
    cluster.warm_variables = {**paceline.environment, RANKS: "plain"}
    servers = ("--servers", "2") if strategy == "parameter-server" else ()
    options = ("--image", "image", "--kind", kind, "--nodes", "2", "--strategy", strategy, *servers)
    finished = paceline.run("run", "--on", "kubernetes", *options, "script.py", "$(X)")
    assert finished.status == 0, finished
    assert sorted(finished.out.splitlines()) == [f"[rank {rank}] {strategy} 2" for rank in (0, 1)]
    assert cluster.objects == {}


def test_the_dry_run_prints_the_manifests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nnodes", "2", "--strategy", "all-reduce", "not-here.py", "$(X)")
    assert command(monkeypatch, "--dry-run", *words) == 0
    printed = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["paceline", "manifests", "--image", "image", "--name", "demo", "run", *words])
    main()
    objects = [[*yaml.safe_load_all(text)] for text in (printed, capsys.readouterr().out)]
    for each in objects:
        assert len(each[0]["stringData"].pop("token")) >= 16
        pod = each[-1]["spec"]["template"]["spec"]["containers"][0]
        pod["command"] = sorted(pod["command"])
    assert objects[0] == objects[1]


def test_each_line_is_printed_once_over_several_connections(
    cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.dropped_after = [3, 0, 150]
    assert follow("for n in range(300): print(n)\nprint('end', end='')") == RunEnd(0, None)
    assert capfd.readouterr().out.splitlines() == [*map(str, range(300)), "end"]
    assert cluster.dropped_after == []


def test_the_status_of_a_failed_pod_is_returned(cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str]) -> None:
    end = follow(
        "import os, sys, time\nif os.environ['PET_NODE_RANK'] == '1': sys.exit(3)\ntime.sleep(60)", num_nodes=2
    )
    assert end.status == 3
    assert end.reason is not None
    assert "pod demo-1-abc ended with status 3" in end.reason
    assert cluster.objects == {}
    assert follow("import os; os.kill(os.getpid(), 9)").status == 137


_LOSES_POD_1 = """
import os, pathlib, sys, time
starts = pathlib.Path("starts")
if os.environ["PET_NODE_RANK"] == "1":
    with starts.open("a") as file:
        file.write(".")
    count = starts.stat().st_size
    if count == 1:
        os.kill(os.getpid(), 9)
    if count == 2:
        sys.exit(75)
    time.sleep(60)
while not starts.exists() or starts.stat().st_size < 3:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_lost_pods_of_an_elastic_run_are_replaced(
    cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    assert follow(_LOSES_POD_1, num_nodes=2, is_elastic=True, kind=kind) == RunEnd(0, None)
    assert cluster.objects == {}
    assert "3 of 2" not in capfd.readouterr().err
    (cluster.folder / "starts").unlink()
    assert follow(_LOSES_POD_1, num_nodes=2, kind=kind).status in (137, 143)


def test_pods_that_kubernetes_removes_are_replaced_without_a_limit(cluster: KubernetesCluster) -> None:
    program = """
import os, pathlib, time
starts = pathlib.Path("starts")
if os.environ["PET_NODE_RANK"] == "1":
    with starts.open("a") as file:
        file.write(".")
    time.sleep(60)
while not starts.exists() or starts.stat().st_size < 3:
    time.sleep(0.02)
"""

    evicted: list[str] = []

    def evict() -> None:
        starts = cluster.folder / "starts"
        running = [name for name, pod in [*cluster.pods.items()] if pod.status["phase"] == "Running"]
        name = next((name for name in running if name.startswith("demo-1-") and name not in evicted), None)
        if name is not None and starts.exists() and starts.stat().st_size > len(evicted):
            evicted.append(name)
            cluster.evict(name)

    end = follow(program, num_nodes=2, is_elastic=True, restarts=0, meanwhile=evict)
    assert end == RunEnd(0, None)


def test_the_status_of_an_elastic_run_is_that_of_node_0(cluster: KubernetesCluster) -> None:
    cluster.backoff_s = 60.0
    program = """
import os, pathlib, sys, time
if os.environ["PET_NODE_RANK"] == "1":
    pathlib.Path("ends").touch()
    sys.exit(75)
while not pathlib.Path("ends").exists():
    time.sleep(0.02)
time.sleep(1.1)  # the times of containers have seconds
sys.exit(3)
"""
    end = follow(program, num_nodes=2, is_elastic=True)
    assert end.status == 3
    assert "pod demo-0-abc ended with status 3" in str(end.reason)


def test_the_number_of_pods_changes(cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path("removed").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
if os.environ["PET_NODE_RANK"] == "2":
    pathlib.Path("added").touch()
while not pathlib.Path("removed").exists():
    time.sleep(0.02)
"""
    printed = ""

    def scale() -> None:
        nonlocal printed
        printed += capfd.readouterr().err
        job = next((path for path in cluster.objects if "/jobs/" in path), None)
        if job is not None and "3 of 3 pods have started" in printed and (cluster.folder / "added").exists():
            cluster.scale(job, 2)
        elif job is not None and "2 of 2 pods have started" in printed:
            cluster.scale(job, 3)

    assert follow(program, num_nodes=2, is_elastic=True, meanwhile=scale) == RunEnd(0, None)
    assert "3 of 3 pods have started" in printed


def test_an_elastic_training_replaces_pods_and_grows(paceline: Commands, cluster: KubernetesCluster) -> None:
    (cluster.folder / "train.py").write_text(TRAIN)
    paceline.environment["KUBECONFIG"] = str(cluster.config)
    cluster.warm_variables = {**paceline.environment, RANKS: "torch"}
    options = ["--strategy", "all-reduce", "--nodes", "2", "--min-ranks", "1", "--max-ranks", "3"]
    words = ["--on", "kubernetes", "--image", "image", "--name", "demo", *options, "--heartbeat-timeout", "2"]
    running = paceline.start("run", *words, "train.py", "", "3")
    running.wait_line("starts 1 ")
    items = cluster.folder / "items1"
    wait_until(lambda: items.exists() and items.stat().st_size > 0, "rank 1 does not train")
    os.killpg(cluster.pods["demo-1-abc"].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    running.wait_line("starts 2 ")
    cluster.scale("/apis/batch/v1/namespaces/ml/jobs/demo", 3)
    running.wait_line("node 2 has arrived")
    finished = running.wait()
    assert finished.status == 0, finished
    last = ends(finished)
    assert last.keys() == {0, 2, 3}
    assert len(set(last.values())) == 1, "the ranks differ"
    check_items(cluster.folder, num_killed=1)


@pytest.mark.parametrize(
    ("fault", "options", "reason"),
    [
        ({"unscheduled": "0/4 nodes are available: 4 Insufficient cpu"}, {}, "4 Insufficient cpu"),
        ({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, {}, "ImagePullBackOff: not found"),
        ({}, {"secret": "mine"}, 'secret "mine" not found'),
        ({"warnings": ["exceeded quota: cpu"]}, {}, "0 of 2 pods have started; FailedCreate: exceeded quota: cpu"),
        ({"waiting": {"reason": "ContainerCreating"}}, {}, "0 of 2 pods have started within 1 s"),
    ],
)
def test_pods_that_do_not_start(
    cluster: KubernetesCluster, fault: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    for name, value in fault.items():
        setattr(cluster, name, value)
    end = follow("", num_nodes=2, timeout_s=1.0, **options)
    assert end.status == 1
    assert end.reason is not None
    assert reason in end.reason
    assert cluster.objects == {}


def test_an_invalid_image_ends_the_run(cluster: KubernetesCluster) -> None:
    cluster.waiting = {"reason": "InvalidImageName", "message": "couldn't parse image"}
    end = follow("")
    assert end.reason is not None
    assert "InvalidImageName: couldn't parse image. The run cannot start" in end.reason


@pytest.mark.parametrize(
    ("status", "expected", "text"),
    [
        (401, 2, "rejects your credentials (401): injected. Log in again"),
        (403, 2, "does not permit the request (403): injected"),
        (404, 2, "no namespace ml or no kind Job in the cluster"),
        (409, 2, "Job demo exists in namespace ml, from another run"),
        (429, 1, "is overloaded (429): injected. Try again later"),
        (500, 1, "failed (500): injected. Try again later"),
    ],
)
def test_errors_of_the_api_server_are_one_sentence(
    cluster: KubernetesCluster,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    status: int,
    expected: int,
    text: str,
) -> None:
    if status == 409:
        cluster.create("/apis/batch/v1/namespaces/ml/jobs/demo", _other_job())
    before = copy.deepcopy(cluster.objects)
    cluster.failures = [] if status == 409 else [("POST", "/jobs", status)] * 100
    assert command(monkeypatch, "--nodes", "2", "train.py") == expected
    errors = capfd.readouterr().err
    assert text in errors
    assert errors.count("\n") == 1
    assert {*cluster.objects} == {*before}
    cluster.objects.clear()


def _other_job() -> dict[str, Any]:
    container = {"name": "node", "command": ["true"]}
    return {
        "kind": "Job",
        "metadata": {"name": "demo"},
        "spec": {"completions": 0, "template": {"spec": {"containers": [container]}}},
    }


def test_temporary_failures_of_the_api_server(cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str]) -> None:
    lost = [("POST", "/secrets", 0), ("POST", "/jobs", 500), ("POST", "/jobs", 0), ("DELETE", "/services", 429)]
    lost += [("GET", "/jobs", 503), ("GET", "/jobs", 0), ("GET", "/pods", 429), ("GET", "/pods", 410)]
    cluster.failures = [*lost, ("GET", "/log", 500)]
    assert follow("print('hello')", num_nodes=2) == RunEnd(0, None)
    output, errors = capfd.readouterr()
    assert output == "hello\nhello\n"
    assert errors.count("The run continues") == 2
    assert "(429)" in errors
    assert "(410)" in errors
    assert cluster.failures == []
    assert cluster.objects == {}


def test_logs_that_may_not_be_read(cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.failures = [("GET", "/log", 403)] * 1000
    assert follow("import sys; print('hello'); sys.exit(3)").status == 3
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.count("does not permit the request (403)") == 1


def test_lines_that_come_faster_than_they_are_printed(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory for lines that are not yet printed is limited."""
    for module in ("kubernetes", "pod_logs"):
        monkeypatch.setattr(f"paceline.launch.engines.{module}.MOST_LINES", 10)
    taken: list[int] = []
    waiting: list[int] = []

    class Output:
        def write(self, data: bytes) -> None:
            taken.append(data.count(b"\n"))
            time.sleep(0.1)  # the reader of the output is slower than the pods
            waiting.append(engine._lines.qsize())

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=Output()))
    role = RunRole(name="ranks", command=(sys.executable, "-c", "while True: print(1)"), num_nodes=2, num_cpus=1)
    with Kubernetes(EngineFlags(pods=PodOptions(image="image", name="demo"))) as engine:
        engine.start([role])
        deadline = time.monotonic() + 60.0
        while len(taken) < 3:
            assert engine.poll() is None
            assert time.monotonic() < deadline
    assert max(taken) == 10
    assert 10 <= max(waiting) <= 12


def test_a_second_ctrl_c_names_the_remaining_objects(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(api: ClusterApi, method: str, *words: Any, **options: Any) -> Any:
        if method == "DELETE":
            raise KeyboardInterrupt
        return original(api, method, *words, **options)

    original = ClusterApi.call
    monkeypatch.setattr(ClusterApi, "call", call)
    role = RunRole(name="ranks", command=("sleep", "60"), num_nodes=2, num_cpus=1)
    engine = Kubernetes(EngineFlags(pods=PodOptions(image="image", name="demo")))
    engine.start([role])
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    errors = capfd.readouterr().err
    assert "Secret demo-token, Service demo, Job demo may still exist" in errors
    assert "Run `kubectl delete secret/demo-token service/demo job/demo --namespace ml`" in errors
    for path in [*cluster.objects]:
        cluster.delete(path)


def test_a_rejection_while_the_run_is_followed(cluster: KubernetesCluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.failures = [("GET", "/pods", 403), ("DELETE", "/jobs", 403)]
    end = follow("import time; time.sleep(60)")
    assert end.reason is not None
    assert "does not permit" in end.reason
    assert "Run `kubectl delete job/demo --namespace ml`" in capfd.readouterr().err
    assert [*cluster.objects] == ["/apis/batch/v1/namespaces/ml/jobs/demo"]
    cluster.delete("/apis/batch/v1/namespaces/ml/jobs/demo")


def test_objects_of_another_run_remain(cluster: KubernetesCluster) -> None:
    """During the run, another user deletes the objects and creates other objects with the same names."""
    role = RunRole(name="ranks", command=("sleep", "60"), num_nodes=2, num_cpus=1)
    with Kubernetes(EngineFlags(pods=PodOptions(image="image", name="demo"))) as engine:
        engine.start([role])
        paths = [*cluster.objects]
        assert {path.partition("/ml/")[2] for path in paths} == {"jobs/demo", "services/demo", "secrets/demo-token"}
        job = next(path for path in paths if "/jobs/" in path)
        cluster.delete(job)
        while job in cluster.objects:
            time.sleep(0.02)
        cluster.create(job, _other_job())
        end = engine.poll()
        assert end is not None
        assert end.reason == "Job demo was deleted, so its exit status is unknown"
    assert [*cluster.objects] == [job]
    assert "deletionTimestamp" not in cluster.objects[job]["metadata"]
    cluster.delete(job)


def test_ctrl_c_deletes_the_run(paceline: Commands, cluster: KubernetesCluster) -> None:
    (cluster.folder / "script.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(60)")
    paceline.environment["KUBECONFIG"] = str(cluster.config)
    running = paceline.start("run", "--on", "kubernetes", "--image", "image", "script.py")
    running.wait_line("waits")
    running.signal(signal.SIGINT)
    finished = running.wait()
    assert finished.status == 130, finished
    assert finished.err.splitlines()[-1] == "paceline: interrupted"
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--partition", "p", "train.py"), "--partition is for --on slurm"),
        (("--node-rank", "1", "train.py"), "--node-rank"),
        (("--nodes", "2", "--min-ranks", "3", "train.py"), "--min-ranks 3"),
        (("--nodes", "2", "--min-ranks", "1", "--max-ranks", "1", "train.py"), "--max-ranks 1: 2 ranks"),
        (
            ("--kind", "jobset", "--strategy", "all-reduce", "--min-ranks", "1", "--max-ranks", "2", "t.py"),
            "--kind job",
        ),
        ((), "no script"),
    ],
)
def test_wrong_options_create_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert command(monkeypatch, *words) == 2
    assert text in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (b"[]", 2, "the file is malformed"),
        (b"\xff\xfe", 2, "the file is malformed"),
        (b"clusters: 3", 2, "the file is malformed"),
        (b"", 2, "file is empty"),
        (b"{{{", 2, "no cluster is configured: while parsing"),
        (b"http://[bad", 2, "the file is malformed"),
        (b"ftp://127.0.0.1", 2, "Not supported URL scheme ftp"),
        (b"http://127.0.0.1:1", 1, "does not answer: [Errno 111] Connection refused"),
        (b"http://127.0.0.1:1\n    proxy-url: '['", 2, "a wrong value"),
        (b'http://127.0.0.1:1\nusers:\n- name: u\n  user: {token: "a\\nb"}', 2, "a wrong value"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(
    cluster: KubernetesCluster,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: bytes,
    status: int,
    reason: str,
) -> None:
    if b"://" in text:
        context = b"current-context: c\ncontexts:\n- name: c\n  context: {cluster: c, user: u}\n"
        users = b"" if b"users" in text else b"\nusers:\n- name: u\n  user: {token: t}"
        text = context + b"clusters:\n- name: c\n  cluster:\n    server: " + text + users
    cluster.config.write_bytes(text)
    started = time.monotonic()
    assert command(monkeypatch, "--nodes", "2", "train.py") == status
    assert time.monotonic() - started < 10
    errors = capfd.readouterr().err
    assert reason in errors
    assert errors.count("\n") == 1, errors


@pytest.mark.parametrize("reply", [b"<html>", b"{}", b"[]", b"null", b"\xff", b'{"metadata": {}}'])
def test_a_server_that_is_no_api_server(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reply: bytes
) -> None:
    monkeypatch.setattr("paceline.launch.engines.kubernetes._PATIENCE_S", 0.0)
    cluster.reply = reply
    assert command(monkeypatch, "train.py") == 1
    errors = capfd.readouterr().err
    assert "does not answer like an API server of Kubernetes. Check the address" in errors.splitlines()[-1]


def test_an_api_server_that_is_lost_before_the_end(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    role = RunRole(name="ranks", command=("sleep", "60"), num_nodes=2, num_cpus=1)
    with Kubernetes(EngineFlags(pods=PodOptions(image="image", name="demo"))) as engine:
        engine.start([role])
        capfd.readouterr()
        cluster.reply = b""
        started = time.monotonic()
    assert time.monotonic() - started < 5
    errors = capfd.readouterr().err
    assert errors.startswith("paceline run: Job demo, Service demo, Secret demo-token may still exist: ")
    assert errors.count("\n") == 1, errors
    for path in [*cluster.objects]:
        cluster.delete(path)


def test_no_cluster_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    assert command(monkeypatch, "train.py") == 2
    errors = capfd.readouterr().err
    assert re.fullmatch(r"paceline: --on kubernetes: no cluster is configured: .*\n", errors)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert command(monkeypatch, "train.py") == 2
    assert "pip install 'paceline[kubernetes]'" in capfd.readouterr().err
