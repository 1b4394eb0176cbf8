"""Every idiom of the conformance suite equals one device with every strategy, or is rejected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tests.conformance import IDIOMS, STRATEGIES, conformance, run_all
from tests.integration.strategies import idiom_variants
from tests.warm.processes import WarmProcess

import paceline
from paceline.protocol import Sequential

PLAIN = [idiom for idiom in IDIOMS if idiom not in idiom_variants.VARIANTS]
ALL_CELLS = dict.fromkeys(STRATEGIES, PLAIN)
SAMPLE_CELLS = {
    name: PLAIN[number :: len(strategies) * step]
    for strategies, step in ((conformance.ONE_PROCESS, 1), (conformance.SEVERAL, 3))
    for number, name in enumerate(strategies)
}
"""Each idiom under a strategy of one process, and a third of the idioms under a strategy of several processes."""


def run_idioms(plan: conformance.Plan) -> dict[str, dict[str, str]]:
    """Return the results by idiom and strategy: equal to one device, or rejected with a message."""

    def start(command: list[str], env: dict[str, str]) -> WarmProcess:
        return WarmProcess([idiom_variants.__file__, *command[3:]], kind="torch", env=env)

    with (
        pytest.MonkeyPatch.context() as patch,
        paceline.local_cluster(workers=2, consistency=Sequential(aggregate="mean")) as cluster,
    ):
        patch.setattr(conformance, "subprocess", SimpleNamespace(Popen=start))
        cells = run_all(str(cluster.scheduler), cluster.token, plan)
    kinds = {(idiom, name): cell for idiom, row in cells.items() for name, cell in row.items()}
    assert not {key: cell for key, cell in kinds.items() if not cell.startswith(("equal", "refused: "))}
    return cells


@pytest.mark.thorough
@pytest.mark.timeout(480)
def test_every_variant_equals_one_device_or_is_rejected_with_a_message() -> None:
    run_idioms(dict.fromkeys(STRATEGIES, idiom_variants.VARIANTS))


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "plan", [pytest.param(SAMPLE_CELLS, id="some"), pytest.param(ALL_CELLS, id="all", marks=pytest.mark.thorough)]
)
def test_idioms_equal_one_device_or_are_rejected_as_documented(plan: conformance.Plan) -> None:
    cells = run_idioms(plan)
    for name in STRATEGIES:
        row = [cells[idiom][name] for idiom in plan[name]]
        assert row.count("equal") > 0.8 * len(row)

    page = (Path(__file__).parents[3] / "docs/reference/idioms.md").read_text()
    documented = {}
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| idiom"):
            idiom, *kinds = line.strip("| ").split(" | ")
            documented[idiom] = {
                name: kind.partition(" ")[0]
                for name, kind in zip(STRATEGIES, kinds, strict=True)
                if idiom in plan[name]
            }
    assert documented == {
        idiom: {name: cell.partition(":")[0] for name, cell in row.items()} for idiom, row in cells.items()
    }
