"""Describe the ranks of a group and their hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.collectives.rendezvous.node import NodeInfo


class GroupLayout:
    """The ranks of the group `name`: `ranks` are world ranks, `rank` is this process's rank in the group."""

    def __init__(self, name: str, ranks: Sequence[int], world_rank: int, world_infos: Sequence[NodeInfo]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(world_rank)
        self.size = len(self.ranks)
        self.infos = tuple(world_infos[rank] for rank in self.ranks)
        domains = [info.memory_domain for info in self.infos]
        self.hosts = tuple(sorted(set(domains), key=domains.index).index(domain) for domain in domains)
        """Host number of every rank; ranks of one host can share memory."""
        self.local_ranks = tuple(rank for rank in range(self.size) if self.hosts[rank] == self.hosts[self.rank])

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks can share memory."""
        return len(self.local_ranks) == self.size
