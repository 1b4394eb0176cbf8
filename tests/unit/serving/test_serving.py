"""The replies of the application, before and after its model is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.data import Columns
from paceline.errors import AddressError, ModelError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.requests import Request
from tests.unit.inference.conftest import CSV, save_weights, write_model

from paceline.serving.app import MAX_BODY_BYTES, ModelSource, PredictionService, make_app
from paceline.serving.server import serve


class ModelClient:
    """An application, called without a network."""

    def __init__(self, source: ModelSource) -> None:
        self._app = make_app(source)

    def __call__(self, method: str, path: str, body: bytes = b"", pieces: int = 1) -> tuple[int, str]:
        return asyncio.run(self._send(method, path, body, pieces))

    async def _send(self, method: str, path: str, body: bytes, pieces: int) -> tuple[int, str]:
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [], "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        size = max(-(-len(body) // pieces), 1)
        parts = [body[start : start + size] for start in range(0, max(len(body), 1), size)]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()

    def predict(self, rows: Any) -> list[float]:
        status, text = self("POST", "/predict", json.dumps(rows).encode(), pieces=3)
        assert status == 200, text
        found: list[float] = json.loads(text)["predictions"]
        return found


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    return save_weights(tmp_path / "model", {3: 0.5, 2**64 - 1: -2.0}, bias=0.25)


def test_predictions_of_rows_with_numbered_features(numbered: Path) -> None:
    client = ModelClient(ModelSource(numbered))
    rows = [{"3": 1}, {str(2**64 - 1): 0.5, "3": 2.0}, {}]
    expected = 1 / (1 + np.exp(-np.array([0.75, 0.25, 0.25])))
    np.testing.assert_allclose(client.predict(rows), expected, rtol=1e-6)
    assert client.predict([]) == []
    many = client.predict(rows * 2000)  # enough rows that a thread computes the prediction
    np.testing.assert_allclose(many, np.tile(expected, 2000), rtol=1e-6)


def test_predictions_of_rows_with_named_columns(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text(CSV)
    model = write_model(tmp_path / "model", data, "csv", Columns("label", ("site", "device"), ("age",)))
    rows = [
        {"site": "news", "age": 31.5, "device": "phone"},
        {"site": "shop", "age": None, "device": "tablet", "id": 7},
        {"site": "news", "age": 7, "device": None},
        {"site": 42, "age": 2.25, "device": "phone"},
    ]
    client = ModelClient(ModelSource(model))
    expected = paceline.load(model).predict(data)
    np.testing.assert_array_equal(np.array([client.predict([row])[0] for row in rows], np.float32), expected)
    status, text = client("POST", "/predict", json.dumps([*rows[:2], {"site": "x"}]).encode())
    assert (status, "row 2 has no 'device'" in text) == (400, True)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "JSON list of rows such as"),
        (b"{}", 400, "Expected `array`"),
        (b'[{"x": 1}]', 400, "Expected `int`"),
        (b'[{"1": "a"}]', 400, "Expected `float`"),
        (b'[{"-1": 1}]', 400, "row 0 has the key -1"),
        (b'[{"1": 1e300}]', 400, "float32"),
        (b"[" * 100_000, 400, "not a JSON list"),
        (b'[{"1": "\xff"}]', 400, "not a JSON list"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "more than 16 MiB"),
    ],
)
def test_bad_bodies_are_refused(numbered: Path, body: bytes, status: int, message: str) -> None:
    found, text = ModelClient(ModelSource(numbered))("POST", "/predict", body)
    assert (found, message in json.loads(text)["error"]) == (status, True), text


def test_incomplete_requests_are_answered_when_the_server_ends(numbered: Path) -> None:
    service = PredictionService(ModelSource(numbered), 1.0)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError("not reached")

    async def client() -> Any:
        task = asyncio.create_task(service.predict(Request({"type": "http", "method": "POST"}, receive)))
        await asyncio.sleep(0)
        task.cancel()  # uvicorn cancels requests after a timeout
        return await task

    response = asyncio.run(client())
    assert (response.status_code, b"the server is shutting down" in response.body) == (503, True)


def test_health_and_metrics(numbered: Path) -> None:
    client = ModelClient(ModelSource(numbered))
    client.predict([{"3": 1}, {}])
    client("POST", "/predict", b"no")
    status, text = client("GET", "/health")
    assert status == 200
    assert json.loads(text).items() >= {"status": "ok", "kind": "lr", "format": "libsvm", "features": 2}.items()
    status, text = client("GET", "/metrics")
    lines = text.splitlines()
    assert 'paceline_requests_total{code="200"} 1.0' in lines
    assert 'paceline_requests_total{code="400"} 1.0' in lines
    assert "paceline_rows_total 2.0" in lines
    assert 'paceline_request_seconds_bucket{le="+Inf"} 2.0' in lines
    assert "paceline_request_seconds_count 2.0" in lines
    assert client("GET", "/predict")[0] == 405
    assert client("GET", "/nothing")[0] == 404


def test_a_newer_model_is_served_unless_it_is_damaged(numbered: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ModelSource(numbered)
    client = ModelClient(source)
    before = client.predict([{"3": 1}])
    source.refresh()
    assert (source.reloads, source.failures) == (0, 0)
    save_weights(numbered, {3: -0.5})
    source.refresh()
    assert (source.reloads, source.failures) == (1, 0)
    after = client.predict([{"3": 1}])
    assert after[0] < before[0]
    whole = (numbered / "manifest.json").read_text()
    (numbered / "manifest.json").write_text(whole[:100])
    for _ in range(2):  # an unchanged damaged model is not loaded again
        source.refresh()
    assert (source.reloads, source.failures) == (1, 1)
    assert client.predict([{"3": 1}]) == after
    moved = numbered.with_name("moved")
    for times in (2, 3):  # a removed model is reported only once until it exists again
        numbered.rename(moved)
        for _ in range(3):
            source.refresh()
        assert source.failures == len(caplog.messages) == times
        assert client.predict([{"3": 1}]) == after
        moved.rename(numbered)
        source.refresh()
    shutil.rmtree(numbered)
    save_weights(numbered, {3: 0.5, 4: 1.0})
    source.refresh()
    assert source.model.num_features == 2


def test_unservable_models_are_reported(numbered: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        serve(tmp_path, host="127.0.0.1", port=0)
    with pytest.raises(AddressError, match="port 70000: expected 0 to 65535"):
        serve(numbered, host="127.0.0.1", port=70000)
    with pytest.raises(AddressError, match=r"cannot serve on no\.such\.host\.invalid:0"):
        serve(numbered, host="no.such.host.invalid", port=0)
    assert os.path.exists(numbered)
