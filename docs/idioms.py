"""Print docs/reference/idioms.md: each idiom of the conformance suite under each strategy, compared with one device.

PYTHONPATH=. python docs/idioms.py > docs/reference/idioms.md
"""

from tests.conformance import IDIOMS, STRATEGIES, as_table, run_all

import paceline
from paceline.protocol import Sequential

TEXT = """\
# What a script may do

You may change gradients between `backward()` and `step()`, and parameters between steps. The table lists idioms of
training scripts and their results under each strategy.

Each idiom is a short training with 2 ranks (under `mirrored` and `central-storage`: 2 replicas). The result is compared
with a training on one device with the whole batch:

- *Equal*: parameters, buffers and optimizer state equal those of one device to 1e-5.
- *Refused (n)*: the training raises error n of the list below the table. The error names an alternative.

The servers use `sequential` consistency. Under `hybrid`, the dense part behaves as under `all-reduce`. The idioms are
in `tests.conformance.IDIOMS`, and a test checks the table. Regenerate this page by
`PYTHONPATH=. python docs/idioms.py > docs/reference/idioms.md`.
"""

with paceline.local_cluster(workers=2, consistency=Sequential(aggregate="mean")) as cluster:
    print(TEXT)
    plan = dict.fromkeys(STRATEGIES, tuple(IDIOMS))
    print(as_table(run_all(str(cluster.scheduler), cluster.token, plan)))
