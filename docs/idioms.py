"""Print docs/reference/idioms.md: every idiom of the conformance suite under every strategy, beside one device.

PYTHONPATH=. python docs/idioms.py > docs/reference/idioms.md
"""

from tests.conformance import as_table, run_all

import paceline
from paceline.protocol import Sequential

TEXT = """\
# What a script may do

Between `backward()` and `step()`, and between steps: each line is a training of its own, of 2 ranks (2 replicas),
beside one device on the whole batch. *Equal*: all that it leaves is the same to 1e-5. *Refused*: it ends with the
sentence of that number, which says what to write instead. Servers are `sequential`; under `hybrid` the dense part is
that of `all-reduce`. The lines are `tests.conformance.IDIOMS`, and a test compares this table with what they do.
Written by `PYTHONPATH=. python docs/idioms.py > docs/reference/idioms.md`.
"""

with paceline.local_cluster(workers=2, consistency=Sequential(aggregate="mean")) as cluster:
    print(TEXT)
    print(as_table(run_all(str(cluster.scheduler), cluster.token)))
