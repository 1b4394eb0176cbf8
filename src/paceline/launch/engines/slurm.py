"""Slurm: run the roles as one job of ``sbatch``, print its output, and report its end."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from paceline.environment import parse_integer
from paceline.errors import PeerError, UsageError, printable
from paceline.meeting.node_list import parse_node_list, parse_repeated

from .engine import RunEnd, RunEngine, RunRole, report
from .options import EngineFlags
from .placement import Placement

_NOTICE_S: Final = 120
"""With ``--requeue``, Slurm sends SIGTERM this long before the job's time limit."""
_REPLY_S: Final = 60.0
_PAUSE_S: Final = 0.5
_POLL_S: Final = 2.0
"""Time between two requests to Slurm. More requests would disturb other users."""
_CANCEL_S: Final = 60.0
_STATUS_OF_SIGTERM: Final = 143
_SHOWN_CHARS: Final = 300
_FIELD = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|NodeList|StdOut)=((?<=StdOut=).*|\S*)")
"""A field of ``scontrol show job``. StdOut may contain spaces, and is the last field of its line."""
_WAITING: Final = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_ENDED: Final = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
}  # fmt: skip
_KEEP_STATUS: Final = 'trap : TERM; "$@"; status=$?; [ $SLURM_PROCID -ne 0 ] || echo $status > $0; exit $status'
"""Script that runs a command and, in the first process of a step, writes its status to a file."""
_NEVER_STARTS = re.compile(
    r"Partition(NodeLimit|TimeLimit|Config)|BadConstraints|Invalid(Account|QOS)|DependencyNeverSatisfied|JobHeldAdmin"
    r"|(QOS|Assoc)\w*PerJobLimit|.*held"
)
"""Slurm's reasons for jobs that wait until a person changes the job or the cluster."""


class Slurm(RunEngine):
    """Runs the roles as one job. Its output file must be on a file system that this machine shares with the nodes."""

    def __init__(self, flags: EngineFlags, name: str) -> None:
        """`name` is the name of the job. Raises UsageError for options of several lines: no script can contain them."""
        self._flags, self._queue_timeout_s = flags.slurm, flags.queue_timeout
        self._name = re.sub(r"[^\w.-]", "_", name)
        for value in (self._flags.partition, self._flags.time, *(self._flags.sbatch or ())):
            if value is not None and (not value.strip() or not value.isprintable()):
                raise UsageError(f"--on slurm: an option of sbatch is {value!r}, expected one line of text")
        self._job: str | None = None
        self._reported = ""
        self._submitted_s = self._polled_s = 0.0
        self._has_started = False
        self._output = ""
        """Path of the job's output; empty until the job has started."""
        self._num_printed = 0
        """Number of output bytes that this process has printed."""
        self._is_visible = False
        """Whether the output file exists on this machine."""

    @override
    def describe(self, roles: Sequence[RunRole]) -> str:
        """Return the script for ``sbatch``. The last role is the job's last step and uses all its nodes and cores."""
        flags = self._flags
        settings = [
            f"job-name={self._name}",
            f"nodes={roles[-1].num_nodes}",
            "ntasks-per-node=1",
            f"cpus-per-task={sum(role.num_cpus for role in roles)}",
            f"output={self._name}-%j.out",
            "open-mode=append",
            *(f"{name}={value}" for name, value in (("partition", flags.partition), ("time", flags.time)) if value),
            *(("requeue", f"signal=TERM@{_NOTICE_S}") if flags.requeue else ()),
            *(("no-kill",) if roles[-1].is_elastic else ()),
            *(setting.removeprefix("--") for setting in flags.sbatch or ()),
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH --{_quote(setting)}" for setting in settings), ""]
        *others, last = roles
        for role in others:
            placed = f"--nodes={role.num_nodes} --ntasks={role.num_nodes} --cpus-per-task={role.num_cpus}"
            lines += [f"srun --job-name={role.name} --overlap {placed} \\", f"  {shlex.join(role.command)} &", ""]
        overlap = "--overlap " if others else ""
        options, wrapper = "", ""
        if last.is_elastic:
            lines += [
                "# The job continues without a lost node. Its status is that of the first process.",
                "result=$(mktemp)",
            ]
            options = "--no-kill --kill-on-bad-exit=0 --wait=0 "
            wrapper = f"bash -c {shlex.quote(_KEEP_STATUS)} $result "
        lines += [f"srun --job-name={last.name} {overlap}{options}--cpus-per-task=$SLURM_CPUS_PER_TASK \\"]
        lines += [f"  {wrapper}{shlex.join(last.command)}" + (" &" if others else "")]
        if others:  # the job ends with its last step, or if another step fails
            lines += ["ranks=$!", "wait -n && wait $ranks"]
        lines += ["status=$?"]
        if last.is_elastic:
            lines += ["if [ -s $result ]; then status=$(cat $result); fi", "rm $result"]
        if flags.requeue:
            lines += [
                "",
                "# After SIGTERM before the time limit: queue the job again, which continues from its checkpoint.",
                f'if [ $status -eq {_STATUS_OF_SIGTERM} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            ]
        return "\n".join([*lines, "exit $status", ""])

    @override
    def start(self, roles: Sequence[RunRole]) -> None:
        text = self.describe(roles)
        # Ctrl-C must not kill sbatch after the submission and before it prints the job's number: use a new session.
        sbatch = _open("sbatch", "--parsable", start_new_session=True)
        try:
            output, errors = sbatch.communicate(text, _REPLY_S)
        except subprocess.TimeoutExpired:
            sbatch.kill()
            raise PeerError(f"sbatch has not replied within {_REPLY_S:g} s. Check squeue for the job") from None
        except BaseException:
            output, _ = sbatch.communicate(timeout=_REPLY_S)
            self._job = _number_of_job(output)
            raise
        if sbatch.returncode:
            raise UsageError(f"--on slurm: sbatch rejects the job: {_last_error(errors)}")
        self._job = _number_of_job(output)
        if self._job is None:
            raise PeerError(f"sbatch printed {printable(output, _SHOWN_CHARS)!r}, expected the number of a job")
        self._submitted_s = time.monotonic()
        report(f"Slurm job {self._job} is submitted; Ctrl-C cancels it")

    @override
    def poll(self) -> RunEnd | None:
        ended = self._poll()
        if ended is None:
            time.sleep(_PAUSE_S)
        return ended

    def _poll(self) -> RunEnd | None:
        self._print_output()
        if self._job is None or time.monotonic() < self._polled_s + _POLL_S:
            return None
        self._polled_s = time.monotonic()
        done = _call("scontrol", "show", "job", self._job)
        if done.returncode:
            if "Invalid job id" not in done.stderr:
                return None  # Slurm's controller does not answer, but the job continues
            job, self._job = self._job, None
            return RunEnd(1, f"Slurm no longer lists job {job}, so its exit status is unknown")
        return self._handle(dict(reversed(_FIELD.findall(done.stdout))))

    def _handle(self, fields: Mapping[str, str]) -> RunEnd | None:
        """Report a change of the job's state. If the job has ended, return its result."""
        state, reason = fields.get("JobState", ""), fields.get("Reason", "None")
        output = fields.get("StdOut", "")
        if state in _ENDED:
            self._output = output
            self._print_output()
            job, self._job = self._job, None
            if self._has_started and not self._is_visible:
                report(f"the output {output} is not visible here: this machine does not share its folder with nodes")
            return _end_of(job, state, reason, fields)
        text = f"job {self._job} is {state.lower()}"
        if state in _WAITING:
            text += f": {reason}" if reason != "None" else ""
            if _NEVER_STARTS.fullmatch(reason):
                return RunEnd(1, f"job {self._job} cannot start: {reason}. It is cancelled")
            limit = self._queue_timeout_s
            if limit is not None and time.monotonic() >= self._submitted_s + limit and not self._has_started:
                return RunEnd(1, f"job {self._job} has not started within {limit:g} s: {reason}. It is cancelled")
        else:
            self._has_started = True
            text += f" on {fields.get('NodeList', '')}, output in {output}"
            self._output = output
        if text != self._reported and state != "COMPLETING":
            self._reported = text
            report(text)
        return None

    @override
    def close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            try:
                done = _call("scancel", job)
            except BaseException:  # a second Ctrl-C
                report(f"job {job} may still run. Run `scancel {job}`")
                raise
            if done.returncode:
                report(f"job {job} is not cancelled: {_last_error(done.stderr)}. Run `scancel {job}`")
                return
            deadline_s = time.monotonic() + _CANCEL_S
            while time.monotonic() < deadline_s:
                done = _call("squeue", "--noheader", "--jobs", job)
                if done.returncode or not done.stdout.strip():
                    break
                self._print_output()
                time.sleep(0.5)
            else:
                report(f"job {job} has not ended within {_CANCEL_S:g} s of its cancellation; check it with squeue")
        self._print_output()

    def _print_output(self) -> None:
        """Print new output. Open the file each time, because a network file system may show new data only then."""
        try:
            file = Path(self._output).open("rb")  # noqa: SIM115
        except OSError:
            return  # a network file system may show the file later or, if the nodes do not share it, never
        with file:
            self._is_visible = True
            file.seek(self._num_printed)
            while data := file.read(1 << 16):
                self._num_printed += len(data)
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


def read_placement(variables: Mapping[str, str]) -> Placement | None:
    """Return the place of this process in a step of ``srun``; None outside of a step.

    Raises UsageError for unreadable variables.
    """
    nodes, step = variables.get("SLURM_STEP_NODELIST"), variables.get("SLURM_STEP_ID")
    if not nodes or not step or not variables.get("SLURM_PROCID"):
        return None  # the script of a job has SLURM_PROCID without a step
    num_launchers = _number(variables, "SLURM_STEP_NUM_TASKS")
    names = parse_node_list(nodes, "SLURM_STEP_NODELIST")
    num_tasks = parse_repeated(variables.get("SLURM_STEP_TASKS_PER_NODE", ""), "SLURM_STEP_TASKS_PER_NODE")
    launcher, local, node = (_number(variables, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NODEID"))
    if len(num_tasks) != len(names) or sum(num_tasks) != num_launchers or node >= len(names):
        raise UsageError(
            f"Slurm's variables disagree: SLURM_STEP_NODELIST has {len(names)} nodes, SLURM_STEP_TASKS_PER_NODE has "
            f"{sum(num_tasks)} tasks on {len(num_tasks)} nodes, SLURM_STEP_NUM_TASKS is {num_launchers} and "
            f"SLURM_NODEID is {node}. Pass --nnodes, --node-rank and --master-addr"
        )
    cores = variables.get("SLURM_CPUS_ON_NODE")
    return Placement(
        launcher=launcher,
        num_launchers=num_launchers,
        local_launcher=local,
        num_local_launchers=num_tasks[node],
        num_cores=_number(variables, "SLURM_CPUS_ON_NODE") if cores else None,
        address=_find_address(names[0]),
        job=variables.get("SLURM_JOB_ID", ""),
        step=step,
    )


def _find_address(node: str) -> str:
    """Return an address of a node: its name if the name resolves, else the address in Slurm's configuration."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        if shutil.which("scontrol"):
            done = _call("scontrol", "show", "node", "-o", node)
            if found := re.search(r"\sNodeAddr=(\S+)", done.stdout):
                return found[1]
    return node


def _quote(setting: str) -> str:
    """Return a setting of sbatch whose value is in double quotes if it has spaces."""
    name, equals, value = setting.partition("=")
    return f'{name}{equals}"{value}"' if " " in value and not value.startswith(('"', "'")) else setting


def _open(*command: str, start_new_session: bool = False) -> subprocess.Popen[str]:
    """Start a command of Slurm. Raises UsageError if it is not installed."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=start_new_session
        )
    except OSError:
        raise UsageError(
            f"--on slurm: no command {command[0]} on this machine. Log in to a machine of a Slurm cluster"
        ) from None


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Raises UsageError if it is not installed; without a reply in time, the status is 1."""
    with _open(*command) as process:
        try:
            output, errors = process.communicate(timeout=_REPLY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return subprocess.CompletedProcess(command, 1, "", f"no reply within {_REPLY_S:g} s")
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _number_of_job(text: str) -> str | None:
    found = re.match(r"(\d+)(;|\s*$)", text)
    return None if found is None else found[1]


def _end_of(job: str | None, state: str, reason: str, fields: Mapping[str, str]) -> RunEnd:
    code, _, number = fields.get("ExitCode", "").partition(":")
    status = int(code) if code.isdigit() and code != "0" else 128 + int(number) if number not in ("", "0") else 0
    if state == "COMPLETED":
        return RunEnd(status, None)
    because = "" if reason in ("None", "NonZeroExitCode") else f" ({reason})"
    return RunEnd(status or 1, f"job {job} ended in state {state}{because} with status {status or 1}")


def _last_error(text: str) -> str:
    """Return the first line of a command's errors, without the command's name."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in text.splitlines() if line.strip()]
    return printable(lines[0], _SHOWN_CHARS) if lines else "no reason is given"


def _number(variables: Mapping[str, str], name: str) -> int:
    return parse_integer(name, variables.get(name, ""))
