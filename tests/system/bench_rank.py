"""One of the two ranks that `test_bench_collectives` starts: ``bench_rank.py HOST:PORT PEER …``."""

from __future__ import annotations

import sys

from paceline.bench.buffers import Buffers
from paceline.bench.collectives import OPS
from paceline.bench.peers import MAKERS
from paceline.collectives import init


def main(address: str, names: list[str]) -> None:
    with init(address=address) as group:
        peers = [MAKERS[name](group) for name in names]
        for op in OPS:
            buffers = Buffers(op, 0 if op == "barrier" else 1024, "float32", group.rank, group.size)
            for peer in peers:
                buffers.fill()
                group.barrier()
                peer.prepare(op, buffers)()
                sys.stdout.write(f"{op} {peer.name} {buffers.is_right()}\n")
                group.barrier()
        for peer in peers:
            peer.close()
        group.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
