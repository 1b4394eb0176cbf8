"""Run every idiom of :mod:`tests.conformance.idioms` under every strategy and on one device, for the table in the docs.

Two processes serve all strategies with several processes, with one cluster of parameter servers that the caller starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.conformance.idioms import IDIOMS, OPTIONS, Trial
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.errors import UsageError
from paceline.temporary import TemporaryFolder
from paceline.torch import strategy
from paceline.torch.strategies.sharded.parameters import as_complete

ONE_PROCESS: dict[str, dict[str, Any]] = {"mirrored": {"replicas": 2}, "central-storage": {"replicas": 2}}
SEVERAL: dict[str, dict[str, Any]] = {"all-reduce": {}, "parameter-server": {}, "sharded": {}}
STRATEGIES = (*ONE_PROCESS, *SEVERAL)
TOLERANCE = 1e-5
_SIZE = 2
_PATIENCE = timedelta(minutes=5)

Outcome = dict[str, Any]
"""The ``values`` of an idiom, the error message of a ``refused`` idiom, or another exception (``raised``)."""
Plan = Mapping[str, Sequence[str]]
"""The idioms to run, by strategy."""


def run_idiom(name: str, idiom: str, options: dict[str, Any]) -> Outcome:
    """Run an idiom with the strategy `name` on this rank."""
    try:
        options = {**options, **OPTIONS.get(idiom, {}).get(name, {})}
        with strategy(name, device="cpu", **options) as chosen:
            return {"values": [as_complete(value, keep=True).tolist() for value in IDIOMS[idiom](Trial(chosen))]}
    except UsageError as error:
        return {"refused": str(error)}
    except Exception:
        return {"raised": traceback.format_exc()}


def run_ranks(scheduler: str, token: str, plan: Plan) -> dict[str, list[Outcome]]:
    """Run idioms under strategies that have several processes, and return the outcomes of each on every rank.

    `scheduler` and `token` belong to a sequential cluster of 2 workers. The keys are ``strategy: idiom``. Raises
    TimeoutExpired if that takes 5 minutes.
    """
    with TemporaryFolder.make("testing") as temporary:
        folder = temporary.path
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        surroundings = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
            "PACELINE_SCHEDULER": scheduler,
            "PACELINE_TOKEN": token,
            "WORLD_SIZE": str(_SIZE),
            "LOCAL_WORLD_SIZE": str(_SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "idioms",
        }
        command = [sys.executable, "-m", "tests.conformance.conformance", str(folder), json.dumps(plan)]
        ranks = [
            subprocess.Popen(command, env={**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(_SIZE)
        ]
        try:
            codes = [rank.wait(_PATIENCE.total_seconds()) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}: their output is on standard error")
        found = [json.loads((folder / f"rank {rank}").read_text()) for rank in range(_SIZE)]
    return {key: [result[key] for result in found] for key in found[0]}


def run_all(scheduler: str, token: str, plan: Plan) -> dict[str, dict[str, str]]:
    """Return the table's cells, by idiom and strategy: ``equal``, ``refused: SENTENCE``, or the failure.

    The arguments are those of :func:`run_ranks`.
    """
    outcomes = run_ranks(scheduler, token, {name: plan[name] for name in SEVERAL})
    idioms = [idiom for idiom in IDIOMS if any(idiom in chosen for chosen in plan.values())]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of an operator wait for one another if the cores are busy
    try:
        for name, options in ONE_PROCESS.items():
            outcomes.update({f"{name}: {idiom}": [run_idiom(name, idiom, options)] for idiom in plan[name]})
        expected = {idiom: run_idiom("one-device", idiom, {}) for idiom in idioms}
    finally:
        torch.set_num_threads(before)
    return {
        idiom: {
            name: _judge(expected[idiom], outcomes[f"{name}: {idiom}"]) for name in STRATEGIES if idiom in plan[name]
        }
        for idiom in idioms
    }


def _judge(expected: Outcome, found: list[Outcome]) -> str:
    for outcome in [expected, *found]:
        if "raised" in outcome:
            return f"raised: {outcome['raised']}"
    refusals = [outcome["refused"] for outcome in found if "refused" in outcome]
    if refusals:
        return f"refused: {re.sub(r'^rank [0-9]+: ', '', refusals[0])}"
    distance = max(
        float((torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max())
        for outcome in found
        for a, b in zip(expected["values"], outcome["values"], strict=True)
    )
    return "equal" if distance <= TOLERANCE else f"differs by {distance:.2g}"


def as_table(cells: dict[str, dict[str, str]]) -> str:
    """Return the cells as a Markdown table. Each rejection has a number, and its message is below the table."""
    sentences: list[str] = []
    lines = [f"| idiom | {' | '.join(f'`{name}`' for name in STRATEGIES)} |", "|---|" + "---|" * len(STRATEGIES)]
    for idiom, row in cells.items():
        shown = []
        for name in STRATEGIES:
            kind, _, sentence = row[name].partition(": ")
            if kind == "refused":
                if sentence not in sentences:
                    sentences.append(sentence)
                shown.append(f"refused ({sentences.index(sentence) + 1})")
            else:
                shown.append(row[name].splitlines()[-1])
        lines.append(f"| {idiom} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {sentence}." for number, sentence in enumerate(sentences, 1))])


def be_rank(folder: Path, plan: Plan) -> None:
    """Run the planned idioms as the rank that the environment names, and write the outcomes to `folder`."""
    torch.set_num_threads(1)
    outcomes: dict[str, Outcome] = {}
    for name, idioms in plan.items():
        for idiom in idioms:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(outcomes))  # a separate part of the store for this call
            options = {"timeout": timedelta(seconds=20), **SEVERAL[name]}
            outcomes[f"{name}: {idiom}"] = run_idiom(name, idiom, options)
    (folder / f"rank {os.environ['RANK']}").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), json.loads(sys.argv[2]))
