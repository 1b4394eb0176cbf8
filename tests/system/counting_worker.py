"""A worker that counts for a number of seconds: ``python counting_worker.py SECONDS FILE``.

It adds 1 to every key, waits for the acknowledgement, reads the keys back, and writes the number of acknowledged pushes
into the file (one int64). After a wrong value it prints the value and ends with status 1.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import paceline

KEYS = np.arange(256, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # the keys are spread over all buckets


def main(seconds: float, path: str) -> int:
    """Count; return the exit status."""
    acknowledged = np.memmap(path, np.int64, "w+", shape=(1,))
    with paceline.connect() as client:
        table = client.sparse_table("counts", update=paceline.SGD(lr=1.0))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            table.push(KEYS, np.full((len(KEYS), 1), -1.0, np.float32), tick=True).wait()
            acknowledged[0] += 1
            found = np.unique(table.pull(KEYS))
            if found.tolist() != [acknowledged[0]]:
                print(f"read {found.tolist()} after {acknowledged[0]} pushes")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
