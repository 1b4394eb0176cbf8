"""Write the spans of ``torch.profiler`` for the timeline of a run: operators and ``record_function`` ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch._C._autograd import _profiler_enabled
from torch.profiler import profile
from torch.profiler.profiler import _KinetoProfile

from paceline.observe.spans.operators import OperatorFile, OperatorSpan

_MOST_LEVELS: Final = 3
"""The levels of nested operators that a timeline shows, in addition to the ranges of ``record_function``."""


class ProfiledOperators:
    """Writes the spans of each profile of this process when the profile ends, also of the profiles of the script."""

    def __init__(self, file: OperatorFile, *, profiles_steps: bool) -> None:
        """With `profiles_steps`, :meth:`begin` and :meth:`end` profile the steps of the timeline."""
        self._profiles_steps = profiles_steps
        self._own: profile | None = None
        stop_trace: Callable[[_KinetoProfile], None] = _KinetoProfile.stop_trace

        def stop(profiled: _KinetoProfile) -> None:
            stop_trace(profiled)
            results = getattr(profiled.profiler, "kineto_results", None)
            if results is not None:
                file.write(_spans(results.events()))

        setattr(_KinetoProfile, "stop_trace", stop)  # noqa: B010  (mypy rejects an assignment)

    def begin(self) -> None:
        """Begin the profile of the timeline's steps, unless the script itself runs a profiler."""
        if self._profiles_steps and not _profiler_enabled():
            self._own = profile()
            self._own.start()

    def end(self) -> None:
        """End the profile, and write its spans. No effect without a profile."""
        own, self._own = self._own, None
        if own is not None:
            own.stop()


def _spans(events: list[Any]) -> Iterator[OperatorSpan]:
    """Yield the ranges of ``record_function``, the outer operators of each thread, and the kernels of each device."""
    open_operators: dict[str, list[int]] = {}
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.end_ns())):
        if event.is_async() or event.is_hidden_event() or event.is_python_function():
            continue
        device = str(event.device_type()).rpartition(".")[2].lower()
        is_cpu = device == "cpu"
        track = f"torch.profiler, thread {event.start_thread_id()}"
        if not is_cpu:
            track = f"torch.profiler, {device}:{event.device_index()}, stream {event.device_resource_id()}"
        elif not event.is_user_annotation():
            ends_ns = open_operators.setdefault(track, [])
            while ends_ns and ends_ns[-1] <= event.start_ns():
                ends_ns.pop()
            ends_ns.append(event.end_ns())
            if len(ends_ns) > _MOST_LEVELS:
                continue
        yield OperatorSpan(track, event.name(), event.start_ns(), event.end_ns())
