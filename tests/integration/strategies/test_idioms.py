"""Every idiom of the conformance suite has the result of one device under every strategy, or is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tests.conformance import IDIOMS, STRATEGIES, conformance, run_all
from tests.integration.strategies import idiom_variants
from tests.warm.processes import WarmProcess

import paceline
from paceline.protocol import Sequential


def run_idioms(idioms: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the cells of these idioms, by idiom and strategy."""

    def start(command: list[str], env: dict[str, str]) -> WarmProcess:
        return WarmProcess([idiom_variants.__file__, *command[3:]], kind="torch", env=env)

    with (
        pytest.MonkeyPatch.context() as patch,
        paceline.local_cluster(workers=2, consistency=Sequential(aggregate="mean")) as cluster,
    ):
        patch.setattr(conformance, "subprocess", SimpleNamespace(Popen=start))
        return run_all(str(cluster.scheduler), cluster.token, idioms)


@pytest.mark.thorough
@pytest.mark.timeout(480)
def test_every_variant_is_as_on_one_device_or_refused_with_a_sentence() -> None:
    cells = run_idioms(idiom_variants.VARIANTS)
    wrong = {(idiom, name): cell for idiom, row in cells.items() for name, cell in row.items()}
    assert not {key: cell for key, cell in wrong.items() if not cell.startswith(("equal", "refused: "))}


@pytest.mark.timeout(480)
def test_idioms_are_as_on_one_device_or_refused_and_as_the_docs_list_them() -> None:
    """One test, so that pytest's workers do not each run the idioms."""
    cells = run_idioms([idiom for idiom in IDIOMS if idiom not in idiom_variants.VARIANTS])
    wrong = {(idiom, name): cell for idiom, row in cells.items() for name, cell in row.items()}
    assert not {key: cell for key, cell in wrong.items() if not cell.startswith(("equal", "refused: "))}
    for name in STRATEGIES:
        assert sum(row[name] == "equal" for row in cells.values()) > 0.8 * len(cells)

    page = (Path(__file__).parents[3] / "docs/reference/idioms.md").read_text()
    documented = {}
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| idiom"):
            idiom, *kinds = line.strip("| ").split(" | ")
            documented[idiom] = [kind.partition(" ")[0] for kind in kinds]
    found = {idiom: [cell.partition(":")[0] for cell in row.values()] for idiom, row in cells.items()}
    assert documented == found
