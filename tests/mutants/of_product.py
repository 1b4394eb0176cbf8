"""Planted defects in servers, clients, the scheduler's runtime, tables, kernels and storage."""

from __future__ import annotations

from typing import Final

from tests.mutants.defect import Defect, Simulation

_PS: Final = "tests/integration/ps"
_SCHEDULER: Final = "tests/unit/ps/scheduler"
_PARTS: Final = ("tests/unit/ps/test_buckets_of_parts.py",)
_STORE: Final = ("tests/unit/ps/test_sparse_store.py",)
_AGGREGATION: Final = ("tests/unit/ps/test_aggregation.py",)
_VIEWS: Final = ("tests/unit/ps/test_client_views.py",)
_SNAPSHOT_PARTS: Final = ("tests/unit/ps/test_snapshot_parts.py",)
_FILES: Final = ("tests/unit/storage/test_snapshot_directory.py", "tests/unit/storage/test_durability.py")
_PRODUCT, _NONE = Simulation.PRODUCT, Simulation.NONE

OF_PRODUCT: Final = (
    # Servers.
    Defect(
        "push-not-remembered",
        "a push that needs no chain is applied, and its number not remembered",
        "ps/server/requests.py",
        "            self._core.admit(worker, header.sequence)\n",
        "",
        unit=(),
        integration=(f"{_PS}/test_exactly_once.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "filter-of-forward-numbers",
        "a replica counts a push by the number of the frame that it came in",
        "ps/server/replicator.py",
        "push, peer.hello.incarnation, info.incarnation, header.sequence, header.epoch, buckets",
        "push, peer.hello.incarnation, info.incarnation, header.request, header.epoch, buckets",
        unit=(),
        integration=(f"{_PS}/test_replication.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "sent-without-filter",
        "a bucket is sent without the filter that belongs to it",
        "ps/server/fills.py",
        "entries = tuple((incarnation, sequence, to_bytes(mask)) for incarnation, sequence, mask in state)",
        "entries = ()",
        unit=(),
        integration=(f"{_PS}/test_replication.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "repeat-acknowledged-at-once",
        "a repeat is acknowledged though the servers behind may lack the push",
        "ps/server/requests.py",
        "        if fresh:\n            if worker in core.workers.counted:\n                dropped, grads, top",
        "        if not fresh:\n            clock = self._tick_of(worker, header)\n"
        "            self._runtime.answer_push(peer, header, selection, clock, 0)\n            return\n"
        "        if fresh:\n            if worker in core.workers.counted:\n                dropped, grads, top",
        unit=(),
        integration=(f"{_PS}/test_exactly_once.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "repeat-compensated-anew",
        "a repeat goes down the chain compensated for another delay than the push",
        "ps/server/requests.py",
        "if self._stale.alters and fresh != buckets:",
        "if self._stale.alters and not buckets:",
        unit=(),
        integration=(f"{_PS}/test_stale_gradients.py",),
        simulation=_NONE,
    ),
    Defect(
        "answered-in-another-view",
        "a server answers what was asked by a view that is over",
        "ps/server/server.py",
        "(header.epoch == core.replication.version or",
        "(header.epoch <= core.replication.version or",
        unit=(),
        integration=(f"{_PS}/test_replication.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "stale-read-served",
        "a read is answered one iteration too early",
        "ps/server/runtime.py",
        "elif not self.core.is_readable(clock):",
        "elif not self.core.is_readable(max(clock - 1, 0)):",
        unit=(),
        integration=(f"{_PS}/test_iterations.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "forwarded-from-receive-buffer",
        "what may be forwarded again lies in the buffer of what comes next",
        "ps/server/pushes.py",
        "[Piece(piece.table, piece.selection.copy(), piece.floats.copy()) for piece in self.pieces]",
        "list(self.pieces)",
        unit=(),
        integration=(f"{_PS}/test_replication.py", f"{_PS}/test_cut_links.py"),
        simulation=_PRODUCT,
    ),
    # The tables of a server.
    Defect(
        "kept-push-is-a-view",
        "a push that waits for its iteration lies in the buffer of what comes next",
        "tables/aggregation.py",
        "return selection.copy(), grads.copy()",
        "return selection.copy(), grads",
        unit=_AGGREGATION,
        simulation=_PRODUCT,
    ),
    Defect(
        "bucket-is-a-view",
        "a bucket that was read for a snapshot or a fill changes with the table",
        "tables/dense_part.py",
        'np.array(self._planes()[:, start:stop].T, order="C", copy=True)',
        "np.ascontiguousarray(self._planes()[:, start:stop].T)",
        unit=_PARTS,
        simulation=_PRODUCT,
    ),
    Defect(
        "state-not-loaded",
        "a bucket that came whole has its values, and not the optimizer's state",
        "tables/dense_part.py",
        "self._planes()[:, start:stop] = records.reshape(len(keys), self.record_words).T",
        "self._planes()[:1, start:stop] = records.reshape(len(keys), self.record_words).T[:1]",
        unit=_PARTS,
        simulation=_PRODUCT,
    ),
    Defect(
        "room-for-one-row-less",
        "room is made for one row less than a push may need",
        "tables/sparse_store.py",
        "self.resize(bucket, _next_limit(bucket, int(counts[bucket]) - 1, self._growth))",
        "self.resize(bucket, max(int(counts[bucket]) - 1, 1))",
        unit=_STORE,
        simulation=_NONE,
    ),
    Defect(
        "put-aside-twice",
        "a row that changes twice during a snapshot is written as it was in between",
        "tables/snapshot_part.py",
        "new = keys[~known]",
        "new = keys",
        unit=_SNAPSHOT_PARTS,
        simulation=_NONE,
    ),
    Defect(
        "sum-not-noted",
        "the sum of an iteration does not count as a change since the last snapshot",
        "tables/snapshot_part.py",
        "        self._touch(selection)\n        self.part.push_sum(selection, grads, factor)",
        "        self.part.push_sum(selection, grads, factor)",
        unit=_SNAPSHOT_PARTS,
        simulation=_NONE,
    ),
    # Kernels.
    Defect(
        "last-of-equal-keys",
        "of the gradients of equal keys only the last one counts, in tables of one word",
        "kernels/dedup.py",
        "out[inverse[i]] += rows[i]",
        "out[inverse[i]] = rows[i]",
        unit=("tests/unit/kernels/test_kernel_cases.py",),
        simulation=_NONE,
    ),
    # Files.
    Defect(
        "not-on-the-disk",
        "a part counts as written before it is on the disk, and the manifest names it",
        "storage/durable_io.py",
        "        os.fsync(file.fileno())\n",
        "",
        unit=_FILES,
        simulation=_NONE,
    ),
    Defect(
        "manifest-before-data",
        "the manifest of a model is in place before the files of tensors that it names",
        "storage/model_directory.py",
        "                name: write_file(folder, f",
        "                name: write_manifest(folder, ModelManifest(tables=(), tensors={}, model=model)) or write_file("
        "folder, f",
        unit=_FILES,
        simulation=_NONE,
    ),
    Defect(
        "rename-not-synced",
        "a snapshot counts as taken though a crash may take back its manifest",
        "storage/snapshot_directory.py",
        "for each in (folder, self.path):",
        "for each in (self.path,):",
        unit=_FILES,
        simulation=_NONE,
    ),
    Defect(
        "checksum-ignored",
        "damaged files are read if they are as long as they should be",
        "storage/checked_files.py",
        "if found != sha256:",
        "if len(found) != len(sha256):",
        unit=_FILES,
        simulation=_NONE,
    ),
    Defect(
        "shared-file-removed",
        "with an old snapshot go the files that a newer one shares with it",
        "storage/snapshot_directory.py",
        "self._remove(number, needed)",
        "self._remove(number)",
        unit=_FILES,
        simulation=_NONE,
    ),
    # Clients.
    Defect(
        "retained-push-is-a-view",
        "a push that may have to be sent again changes with the caller's array",
        "ps/client/exchange.py",
        "arrays, self.memory = copies.copy(self.frame[1:3])",
        "arrays = self.frame[1:3]",
        unit=_VIEWS,
        simulation=_PRODUCT,
    ),
    Defect(
        "values-in-the-wrong-rows",
        "what is asked for again after a second view change goes to the rows of the first",
        "ps/client/exchange.py",
        "chosen if positions is None else positions[chosen]",
        "chosen",
        unit=_VIEWS,
        simulation=_PRODUCT,
    ),
    Defect(
        "expelled-client-waits",
        "a client that hears that it was declared dead goes on waiting for servers",
        "ps/client/client.py",
        'follower.fail(PeerError(f"this {role} was declared dead: {notice.reason}; connect again"))',
        "pass",
        unit=(),
        integration=(f"{_PS}/test_declared_dead.py",),
        simulation=_PRODUCT,
    ),
    # The scheduler's runtime.
    Defect(
        "call-carried-out-twice",
        "a call that comes again before it is answered counts twice: a lease is granted twice",
        "ps/scheduler/sessions.py",
        "            self._send_answer(header.request, answer)\n        return False",
        "            self._send_answer(header.request, answer)\n        return answer is None",
        unit=(f"{_SCHEDULER}/test_sessions.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "incarnation-not-gone",
        "members do not hear that somebody is gone whose rank another one has",
        "ps/scheduler/maps.py",
        "gone=tuple([member.incarnation for member in base.members if member not in after]),",
        "gone=tuple([each.incarnation for each in base.members if (each.role, each.rank) not in "
        "{(other.role, other.rank) for other in after}]),",
        unit=(f"{_SCHEDULER}/test_maps.py",),
        simulation=_PRODUCT,
    ),
    Defect(
        "process-number-reused",
        "a member counts as alive while any process has the number that it had",
        "ps/scheduler/processes.py",
        "if begin_of(process.pid) != process.started:",
        "if begin_of(process.pid) is None:",
        unit=(f"{_SCHEDULER}/test_processes.py",),
        simulation=_NONE,
    ),
)
