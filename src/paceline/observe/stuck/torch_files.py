"""Write recorded collectives as files of PyTorch's flight recorder."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe.stuck.processes import read_processes
from paceline.observe.stuck.recorder import COLLECTIVE, RecordedEvent, RecordedGroup
from paceline.observe.stuck.stacks import read_recorder

_VERSION: Final = "2.10"
_BACKEND: Final = "gloo"
"""The analyser accepts only the names of PyTorch's own backends."""
_UNEVEN: Final = {
    "all_gather (uneven)": "all_gather_v",
    "reduce_scatter (uneven)": "reduce_scatter_v",
    "all_to_all (uneven)": "all_to_all_v_single",
}
_DTYPES: Final = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "bool": "Bool"}
_DTYPES_OF_INTEGERS: Final = {"int8": "Char", "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long"}


def check_directory(directory: Path) -> None:
    """Create the directory for the files. Raises UsageError if this is impossible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--flight-recorder {directory}: cannot create this folder: {error.strerror}") from None


def write_torch_files(folders: Sequence[Path], directory: Path) -> list[Path]:
    """Write a file for each rank in the jobs' folders, and return the files. Raises OSError.

    The names are ``paceline_rank_0``, ``paceline_rank_1``, and so on. Ranks that have ended are included. The files
    contain the collectives, without messages and requests.
    """
    newest = {
        process.rank: (process, folder)
        for folder in folders
        for process in sorted(read_processes(folder), key=lambda process: int(process.start or 0))
        if process.rank is not None
    }
    written = []
    for rank, (process, folder) in sorted(newest.items()):
        events, groups = read_recorder(process, folder)
        path = directory / f"paceline_rank_{rank}"
        path.write_bytes(pickle.dumps(to_torch_format(events, groups)))
        written.append(path)
    return written


def to_torch_format(events: Sequence[RecordedEvent], groups: dict[int, RecordedGroup]) -> dict[str, Any]:
    """Return the content of a rank's file."""
    entries = [
        _entry(event, groups[event.operation.group])
        for event in events
        if event.operation.kind == COLLECTIVE and event.operation.group in groups
    ]
    configuration = {
        group.name: {"name": group.name, "desc": "undefined", "ranks": str(list(group.ranks))}
        for group in groups.values()
    }
    return {"version": _VERSION, "pg_config": configuration, "pg_status": _status(events, groups), "entries": entries}


def _entry(event: RecordedEvent, group: RecordedGroup) -> dict[str, Any]:
    operation = event.operation
    name = operation.name.partition(" of ")[0]  # calls with many sizes have a hash in their name
    name = _UNEVEN.get(name, name.partition(" ")[0])
    shape = list(operation.shape)
    rows = [shape[0] * len(group.ranks), *shape[1:]] if shape else [len(group.ranks)]
    inputs, outputs = [shape], [shape]
    if name == "all_gather":
        inputs, outputs = [shape], [rows]
    elif name == "reduce_scatter":
        outputs = [[shape[0] // len(group.ranks), *shape[1:]] if shape else [1]]
    dtype = {**_DTYPES, **_DTYPES_OF_INTEGERS}.get(operation.subject, operation.subject)
    if not operation.subject:
        inputs, outputs = [], []
    is_done = event.end_ns > 0
    return {
        "record_id": event.count,
        "pg_id": group.number,
        "process_group": (group.name, "undefined"),
        "collective_seq_id": event.sequence,
        "p2p_seq_id": 0,
        "op_id": event.sequence,
        "profiling_name": f"{_BACKEND}:{name}",
        "time_created_ns": event.start_ns,
        "time_discovered_started_ns": event.start_ns,
        "time_discovered_completed_ns": event.end_ns if is_done else None,
        "duration_ms": (event.end_ns - event.start_ns) / 1e6 if is_done else None,
        "input_sizes": inputs,
        "input_dtypes": [dtype] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "state": "completed" if is_done else "started",
        "timeout_ms": 0,
        "is_p2p": False,
        "retired": is_done,
        "frames": [],
    }


def _status(events: Sequence[RecordedEvent], groups: dict[int, RecordedGroup]) -> dict[str, dict[str, int]]:
    """Return the last collective of each group."""
    status = {}
    for group in groups.values():
        own = [
            event for event in events if event.operation.kind == COLLECTIVE and event.operation.group == group.number
        ]
        done = [event.sequence for event in own if event.end_ns > 0]
        last = max((event.sequence for event in own), default=-1)
        status[group.name] = {"last_enqueued_collective": last, "last_started_collective": last}
        status[group.name]["last_completed_collective"] = max(done, default=-1)
    return status
