"""Who posts the job of a simulated cluster, takes what workers find, and ends the cluster when all is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from paceline.protocol.jobs import JobAccount, JobSpec, JobState, TakenReport, messages
from paceline.protocol.membership import Role
from paceline.protocol.scheduler import View
from simulator.messages import EndWork
from simulator.node import SimulatedNode

if TYPE_CHECKING:
    from simulator.cluster import Cluster

_POLL_S = 0.05


class Poster(SimulatedNode):
    """A loop around a line. One that is declared dead is followed by another, which goes on from the last account."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        super().__init__("poster", name, cluster, role=Role.OBSERVER)
        self._job = 0

    @override
    def mapped(self, former: View | None, new: View) -> None:
        pass

    @override
    def attached(self) -> None:
        pass

    @override
    def welcomed(self) -> None:
        if self.cluster.is_done:
            self._end()
        else:
            self._post()

    def _post(self) -> None:
        settings, account = self.cluster.settings, self.cluster.account
        spec = JobSpec(
            description=b"",
            files=(self.cluster.random.choice((settings.num_shards, None)),) if account is None else account.files,
            epochs=settings.epochs,
            assignment=self.cluster.random.choice(("first-come", "strided")),
            done=() if account is None else account.done,
            progress={} if account is None else account.progress,
        )
        self.cluster.oracle.posted(spec.done)
        self.line.ask(messages.PostJob(spec=spec), self._posted)

    def _posted(self, number: int) -> None:
        self._job = number
        self._poll()

    def _poll(self) -> None:
        self.line.ask(messages.JobStatus(job=self._job), self._on_state)

    def _on_state(self, state: JobState | Exception) -> None:
        if not isinstance(state, JobState) or state.failed:  # it was taken for gone, or came too late to a scheduler
            self._post()
            return
        if state.num_reports:
            self.line.ask(messages.TakeReports(job=self._job), self._on_report)
        elif state.finished:
            self.cluster.oracle.finished(state, self.cluster.expected, self.cluster.with_reports)
            self.cluster.is_done = True
            self._end()
        else:
            if not self.cluster.has_reports:
                self.line.ask(messages.GetAccount(job=self._job), self._on_account)
            self.later(_POLL_S, self._poll)

    def _on_account(self, account: JobAccount | Exception) -> None:
        if isinstance(account, JobAccount):
            self.cluster.account = account

    def _on_report(self, report: TakenReport | Exception | None) -> None:
        if isinstance(report, TakenReport):
            self.cluster.oracle.reported(report.fields["shard"])
        self._poll()

    def _end(self) -> None:
        self.line.ask(EndWork(), lambda _: self.later(4 * _POLL_S, self._end))  # again, for those that come later
