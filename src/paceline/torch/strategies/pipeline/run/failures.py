"""Raise the same error on every rank: the failing rank publishes its error, then aborts the waits of other ranks."""

from __future__ import annotations

import contextlib
import json
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, PeerError, StageError, UsageError
from paceline.torch.strategies.pipeline.run.actions import ActionError
from paceline.torch.strategies.pipeline.run.stage import LayerError

_KEY = "paceline pipeline failure"
_PATIENCE = timedelta(milliseconds=200)


class Failures:
    """Publishes this rank's failure, and raises other ranks' failures."""

    def __init__(self, rank: int, groups: Sequence[Any]) -> None:
        """`groups` are the process groups in which other ranks may wait for this rank."""
        self._rank = rank
        self._groups = groups
        # The key contains a new number, because other pipelines of this program may use the same store.
        life = dist.distributed_c10d._get_default_store().add(f"{_KEY} lives of rank {rank}", 1)
        self._key = f"{_KEY} {life}"
        self._stages: list[str] = []
        self._places: list[int] = []
        self.cut = ""
        """A part of error messages: it lists the arguments of the current call that are cut into microbatches."""

    def name_stages(self, names: Sequence[str], places: Sequence[int]) -> None:
        self._stages, self._places = list(names), list(places)

    @contextlib.contextmanager
    def raised_everywhere(self) -> Iterator[None]:
        """Return a context that raises its error on every rank, with the traceback of the first rank that failed."""
        try:
            yield
        except (PeerError, dist.DistBackendError) as error:
            text = self._receive()
            if text is not None:
                raise StageError(text) from None
            ranks = getattr(error, "ranks", ())
            lost = [f"stage {s} ({name})" for s, name in enumerate(self._stages) if self._places[s] in ranks]
            if not lost:
                raise
            raise StageError(
                f"the process of {' and '.join(lost)} has ended, so the pipeline has failed ({error}). Restart the "
                "program from its last checkpoint"
            ) from None
        except ActionError as failure:
            raise StageError(self._report(self._describe(failure))) from failure.__cause__
        except LayerError as failure:
            raise StageError(self._report(self._describe_layer(failure))) from failure.__cause__
        except UsageError as error:
            self._report(f"rank {self._rank}: {error}")
            raise
        except Exception as error:  # report any error, because the other ranks would wait forever
            self._report(f"rank {self._rank} failed: {self._with_traceback(error)}")
            raise

    def _describe(self, failure: ActionError) -> str:
        action, cause = failure.action, failure.__cause__
        layer = ""
        if isinstance(cause, LayerError):
            layer, cause = f" in {cause}", cause.__cause__
        assert cause is not None
        direction = "forward" if action.kind == "F" else "backward"
        name = self._stages[action.stage] if action.stage < len(self._stages) else "?"
        return (
            f"stage {action.stage} ({name}, rank {self._rank}) failed{layer}, microbatch {action.microbatch}, "
            f"{direction}: {self._with_traceback(cause)}"
        )

    def _describe_layer(self, failure: LayerError) -> str:
        cause = failure.__cause__
        assert cause is not None
        return (
            f"layer {failure} failed on rank {self._rank}, while layers were measured in the first call: "
            f"{self._with_traceback(cause)}"
        )

    def _with_traceback(self, error: BaseException) -> str:
        """Return an error with its traceback, which is indented so that the launcher shows the error's text first."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        return f"{type(error).__name__}: {error}{self.cut}\n{textwrap.indent(trace, '  ')}"

    def _report(self, text: str) -> str:
        with contextlib.suppress(Exception):
            dist.distributed_c10d._get_default_store().set(self._key, json.dumps(text))
        for group in self._groups:
            with contextlib.suppress(PacelineError, RuntimeError):
                group.abort()
        return text

    def _receive(self) -> str | None:
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.wait([self._key], _PATIENCE)
            text: str = json.loads(store.get(self._key))
            return text
        return None
