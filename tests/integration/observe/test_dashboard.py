"""The page of a run: its server, its token, and the report."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import socketserver
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.errors import PeerError, UsageError
from paceline.observe.dashboard import make_report
from paceline.observe.metrics import MetricValues
from paceline.observe.outputs import open_outputs
from paceline.observe.plots import PageTable, Plot, Series, page_bytes
from paceline.observe.top import fetch_state, show_top
from paceline.observe.web import Page, WebRequest, WebServer, parse_listen_address


def get(address: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_a_dashboard_needs_its_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_outputs("paceline run", metrics="0", dashboard="0") as collector:
        values = MetricValues()
        values.set("paceline_members", 3.0, "workers")
        collector.update(values)
        metrics, page = (line.split()[-1] for line in capsys.readouterr().err.splitlines())
        assert metrics.partition("/metrics")[0] == page.partition("/?")[0]  # equal places share one server
        status, text, headers = get(page)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert not re.search(r"https?://(?!www.w3.org/)", text)  # the page works without a network
        until = time.monotonic() + 20
        while not (state := fetch_state(page)).get("members") and time.monotonic() < until:
            time.sleep(0.05)
        assert state["members"] == {"workers": 3.0}
        base, _, token = page.partition("?token=")
        for wrong in (base, f"{base}?token=", f"{base}?token={token[:-1]}", f"{base}?token=%C3%A9", f"{base}state"):
            status, text, _ = get(wrong)
            assert status == 403
            assert text.startswith("Open the address that the command has printed")
        assert get(page, "POST")[0] == 501  # no action
        with pytest.raises(UsageError, match="wrong token"):
            fetch_state(base)
        console = Console(record=True, width=80)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        show_top(page, console)
        assert "3 workers" in console.export_text()
    with pytest.raises(PeerError, match=r"no dashboard answers at .*: Connection refused"):
        fetch_state(page)
    with open_outputs("paceline run", metrics="0"), pytest.raises(PeerError, match="there is no dashboard"):
        fetch_state(capsys.readouterr().err.split()[-1])
    with pytest.raises(UsageError, match="expected the address"):
        fetch_state("localhost")
    with pytest.raises(UsageError, match="expected the address"):
        fetch_state("http://[::1/?token=x")


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET http://[::1/ HTTP/1.0",
        b"GET http://[x]/ HTTP/1.0",
        b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text; version=\x01",
    ],
)
def test_malformed_requests_get_an_answer(capfd: pytest.CaptureFixture[str], request_line: bytes) -> None:
    with open_outputs("paceline run", metrics="0"):
        port = int(capfd.readouterr().err.split(":")[-1].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(request_line + b"\r\n\r\n")
            assert connection.recv(1000).split()[1] in (b"200", b"400")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "content", ["{}", '{"has_ended": 1, "seconds": "x", "title": "t"}', '{"has_ended": false, "servers": null}']
)
def test_top_rejects_the_answer_of_another_server(content: str) -> None:
    with WebServer.start("0", "--dashboard") as server:
        server.routes["/state"] = lambda request: Page(content.encode(), "application/json")
        for console in (Console(), Console(force_terminal=True)):
            with pytest.raises(PeerError, match="the answer is not that of a dashboard of this version of Paceline"):
                show_top(f"{server.address}/?token=x", console)


def test_top_does_not_wait_for_an_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.observe.top._MOST_BYTES", 1000)
    with WebServer.start("0", "--dashboard") as server:
        server.routes["/state"] = lambda request: Page(b" " * 1001, "application/json")
        with pytest.raises(PeerError, match="no complete answer within 5 s"):
            fetch_state(f"{server.address}/?token=x")


def test_a_report_is_one_page_with_the_last_figures(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    with open_outputs("paceline train", report=report) as collector:
        values = MetricValues()
        values.set("paceline_training_loss", 0.25)
        collector.update(values)
        collector.add_event("</script><script>alert(1)</script>")
    text = report.read_text()
    found = re.search(r"const GIVEN = (\{.*\});", text)
    assert found is not None
    state = json.loads(found[1])
    assert (state["loss"], state["has_ended"]) == (0.25, True)
    assert [event for _, event in state["events"]] == ["</script><script>alert(1)</script>"]
    assert text.count("</script>") == 1
    with pytest.raises(UsageError, match=r"--report .*: No such file"), open_outputs("x", report=tmp_path / "no" / "x"):
        pass


def test_a_report_of_a_script_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "run", "\udcff.py"])
    report = tmp_path / "report.html"
    with open_outputs("paceline run", report=report) as collector:
        collector.add_event("rank 0 of \udcff.py")
    found = re.search(r"const GIVEN = (\{.*\});", report.read_text())
    assert found is not None
    state = json.loads(found[1])
    assert (state["title"], state["events"][0][1]) == (r"paceline run \udcff.py", r"rank 0 of \udcff.py")
    assert rb"\\udcff" in page_bytes("paceline compare \udcff.py", "", [])


def test_many_clients_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    may_accept, process = threading.Event(), socketserver.ThreadingMixIn.process_request

    def process_later(self: Any, request: socket.socket, address: tuple[str, int]) -> None:
        assert may_accept.wait(60)
        process(self, request, address)

    monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", process_later)
    with WebServer.start("0", "--dashboard") as server, contextlib.ExitStack() as stack:
        stack.callback(may_accept.set)
        server.routes["/"] = lambda request: Page(b"page", "text/plain")
        address = parse_listen_address(server.address.removeprefix("http://"), "")
        # The server accepts one connection now. The system would drop those beyond the length of its queue.
        clients = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(100)]
        may_accept.set()
        clients[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        with clients[-1].makefile() as answer:
            assert answer.read().endswith("page")


def test_a_browser_that_leaves_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with WebServer.start("0", "--dashboard") as server:
        asked, may_answer = threading.Event(), threading.Event()

        threads = []

        def answer(request: WebRequest) -> Page:
            threads.append(threading.current_thread())
            asked.set()
            assert may_answer.wait(20)
            return Page(bytes(1 << 24), "text/plain")

        server.routes["/"] = answer
        with socket.create_connection(parse_listen_address(server.address.removeprefix("http://"), "")) as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            browser.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert asked.wait(20)
        may_answer.set()
        threads[0].join(20)
    assert capsys.readouterr().err == ""


def test_outputs_that_cannot_start_write_no_report(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_bytes(b"of an earlier run")
    with pytest.raises(UsageError), open_outputs("x", report=report, metrics="99999"):
        pass
    assert report.read_bytes() == b"of an earlier run"
    link, absent = tmp_path / "link.html", tmp_path / "absent.html"
    link.symlink_to(absent)
    for path in (absent, link):
        with pytest.raises(UsageError), open_outputs("x", report=path, metrics="99999"):
            pass
        assert not absent.exists()
    assert link.is_symlink()


def draw(page: Path) -> str:
    """Return the tree of a page after its script has run in a browser."""
    folder = page.parent
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    tree = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    return re.sub(r"<(style|script)>.*?</\1>|<section[^>]* hidden.*?</section>", "", tree, flags=re.DOTALL)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
def test_chromium_draws_plots_and_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    series = [
        Series(name=name, x=[2, 4, 1024], y=y, color=number, is_dashed=number == 1)
        for number, (name, y) in enumerate({"<a>": [1.0, 0.5, 0.25], "b": [0.75, 0.75, 0.75]}.items())
    ]
    plot = Plot(title="Curves", x_label="nodes", series=series, format="percent", is_log=True)
    steps = Series(name="c", x=[0, 1], y=[0.0, 12500.0], color=0)
    numbers = Plot(title="c", x_label="", series=[steps], format="count")
    table = PageTable(title="Cells", columns=["e"], rows=[["f"]])
    page.write_bytes(page_bytes("a simulation", "2 ranks", [plot, numbers, table]))
    drawn = draw(page)
    for text in (
        "&lt;a&gt;",
        "1,024</text>",
        ">2.5k</text>",
        ">5k</text>",
        ">10k</text>",
        "100%</text>",
        "<th>e</th>",
        "<td>f</td>",
    ):
        assert text in drawn, text
    assert "<td>f</td>" in drawn
    curves = re.findall(r'<path d="M([^"]*)"', drawn)
    points = [[tuple(map(float, point.split(","))) for point in curve.split("L")] for curve in curves]
    (x0, y0), (x1, y1), (x2, y2) = points[0]
    assert (x2 - x1) / (x1 - x0) == pytest.approx(8, rel=0.01)  # from 4 to 1,024 are eight doublings
    assert (y2 - y0) / (y1 - y0) == pytest.approx(1.5, rel=0.01)
    assert len({y for _, y in points[1]}) == 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
def test_chromium_draws_the_page(tmp_path: Path) -> None:
    """The browser runs the page's script on the figures of a run with ranks, servers and waits."""
    ranks = [
        {
            "rank": rank,
            "examples_per_s": 10.0,
            "step_s": 0.1,
            "phases": {"forward": 0.5, "communication": 0.5},
            "memory_bytes": 1e9,
            "last_seen_s": 60.0 * (rank == 1),
        }
        for rank in range(2)
    ]
    curves = {"examples_per_s": [10.0, 20.0], "loss": [None, 0.5]}
    empty = {name: [None, None] for name in ("staleness", "bytes_per_s", "memory_bytes", "wait_share")}
    state = {
        "title": "paceline run <b>", "seconds": 65.0, "has_ended": False, "examples": 1500, "done": 0.5,
        "phases": ["data", "forward", "communication"], "series": {"time": [1.0, 10.0], **curves, **empty},
        "silent_s": 5.0, "members": {"servers": 1, "workers": 2},
        "epoch": 2, "failovers": 1, "ranks": ranks, "events": [[3.0, "an event"]],
        "servers": [{"server": 0, "rows": 12345, "memory_bytes": 1e6, "bytes_per_s": 1e3, "held": 0}],
        "waited_for": [{"rank": 1, "waits": {"0": 0.5}, "total": 0.5}], "stuck_ranks": [], "alarm": None,
    }  # fmt: skip
    page = tmp_path / "page.html"
    page.write_bytes(make_report(state))
    drawn = draw(page)
    for text in (
        "running for 1:05, 1.50k examples, 50% done", "paceline run &lt;b&gt;</h1>", "20 examples/s", "0.5000",
        "1 server, 2 workers, view 2, 1 failover", "0: 12.3k rows", "rank 1: no report for 60 s", "10/s, step 100 ms",
        "0.50 s per second", "</time>an event",
    ):  # fmt: skip
        assert text in drawn, text
    assert "Staleness" not in drawn  # it has no values
    marks = re.findall(r">(\d+:\d\d)</text>", drawn)
    assert marks == 2 * ["0:00", "0:05", "0:10"]  # whole seconds at equal distances, in both charts
    state |= {"stuck_ranks": [0], "alarm": "no progress"}
    page.write_bytes(make_report(state))
    stuck = draw(page)
    assert "no progress</span>" in stuck
    assert stuck.count("--alarm") == drawn.count("--alarm") + 1
    page.write_bytes(make_report({**state, "has_ended": True, "examples_per_s": 15.0}))
    ended = draw(page)
    assert "no progress" not in ended
    assert "15 examples/s" in ended


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
def test_chromium_runs_no_code_in_names_and_draws_extreme_numbers(tmp_path: Path) -> None:
    """Names stay text, and a large constant loss does not hang the page."""
    name = """<img src=x onerror="document.title='run'">"'></script><script>document.title='run'</script>"""
    lines = [Series(name=name, x=[1, 2], y=[loss, loss], color=0) for loss in (5e15, 1e300)]
    plots = [Plot(title=name, x_label=name, series=[line], format="number", note=name) for line in lines]
    table = PageTable(title=name, columns=[name], rows=[[name]], note=name)
    page = tmp_path / "page.html"
    page.write_bytes(page_bytes(name, name, [*plots, table]))
    drawn = draw(page)
    assert "<title>&lt;img" in drawn
    assert not re.search("<img|<script", drawn)
    assert drawn.count("<path d=") == 2
    assert "NaN" not in drawn
