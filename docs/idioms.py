"""Print the table of docs/strategies.md: every idiom of the conformance suite under every strategy.

python docs/idioms.py
"""

import paceline
from paceline.protocol import Sequential
from paceline.torch.testing import as_table, run_all

with paceline.local_cluster(workers=2, consistency=Sequential(aggregate="mean")) as cluster:
    print(as_table(run_all(str(cluster.scheduler), cluster.token)))
