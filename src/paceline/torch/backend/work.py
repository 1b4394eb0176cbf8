"""Define the ``Work`` objects that calls of a process group return to PyTorch, and their futures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from typing_extensions import override

from paceline.collectives import CollectiveTicket
from paceline.errors import PacelineError
from paceline.torch.backend.errors import Terms, in_torch_terms
from paceline.torch.backend.tensors import After


class _CallbackDepth(threading.local):
    depth = 0


_callbacks = _CallbackDepth()


def is_in_callback() -> bool:
    return _callbacks.depth > 0


_AnyTensor: Any = torch.Tensor
"""The base class without types, because torch does not declare the types of its overridable methods."""


class _Failed(_AnyTensor):  # type: ignore[misc]
    """The value in the future of a failed call. Each use of this value raises the call's error.

    It exists because C++ code of PyTorch reads a future's value, but not its error.
    """

    error: Exception

    @staticmethod
    def __new__(cls, error: Exception) -> _Failed:
        tensor: Any = torch.Tensor._make_wrapper_subclass(cls, (0,))
        tensor.error = error
        return cast("_Failed", tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:
            if isinstance(argument, _Failed):
                raise argument.error
        raise RuntimeError("the result of a failed call was used. Call wait() of the call to get its error")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"the result of a call that failed: {self.error}"


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. Calls inside its callbacks use a second group.

    A callback, such as PowerSGD's communication hook, may make calls and wait for these calls. It runs in the group's
    thread, which cannot wait for its own calls, or in the caller's thread if the future is already done. In one group,
    the calls of callbacks and of the main thread would have another order on each rank. The second group runs only
    calls of callbacks. Their order is the order of the futures, which is equal on all ranks.
    """

    def fail(self, error: Exception, *, is_one_tensor: bool) -> None:
        """Complete the future with an error, for Python and C++.

        With ``is_one_tensor``, C++ expects a tensor as the value, else a list.
        """

        def unwrap(_: Any) -> None:
            raise error

        self._set_unwrap_func(unwrap)
        self.set_result(_Failed(error) if is_one_tensor else [_Failed(error)])

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> CallFuture:
        child = CallFuture()

        def run(done: torch.futures.Future[Any]) -> None:
            _callbacks.depth += 1
            try:
                result = callback(done)
            except Exception as error:
                child.fail(error, is_one_tensor=True)  # C++ expects one tensor as the result of a communication hook
            else:
                child.set_result(result)
            finally:
                _callbacks.depth -= 1

        self.add_done_callback(run)
        return child


Value: TypeAlias = Sequence[Tensor]
"""The tensors that a call fills."""

_NO_TIMEOUT: Final = timedelta(0)
"""The default timeout in PyTorch's C++ code."""
_AT_MOST: Final = timedelta(days=365)

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


class TracedOperation:
    """An operation in PyTorch's profiler, from its creation to :meth:`end`. It is named as Gloo's operations are."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._began_in = threading.get_ident()
        self._handle: Any = torch._C._autograd._record_function_with_args_enter(f"paceline:{name}", *tensors)

    def end(self) -> None:
        """End the operation in another thread than its first one: the profiler then shows it as asynchronous."""
        if threading.get_ident() != self._began_in:
            self._exit()
        else:
            thread = threading.Thread(target=self._exit, name="paceline-profiler")
            thread.start()
            thread.join()

    def _exit(self) -> None:
        torch._C._autograd._record_function_with_args_exit(self._handle)


class CallWork(Work):
    """Base class of a process group's calls. Subclasses define the wait, the state and the future."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self._value = value

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    @override
    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._value)


class FinishedWork(CallWork):
    """A call that has finished."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        """Return None, because a failed call never has a FinishedWork."""

    def get_future(self) -> CallFuture:
        future = CallFuture()
        future.set_result(list(self._value))
        return future


class TicketWork(CallWork):
    """A pending call."""

    def __init__(
        self,
        tickets: Sequence[CollectiveTicket],
        value: Value,
        terms: Terms,
        *,
        after: After | None = None,
        event: TracedOperation | None = None,
    ) -> None:
        """`tickets` finish in their order. Then `after` runs. The work is done when `after` has returned."""
        super().__init__(value)
        self._tickets = tickets
        self._terms = terms
        self._after, self._event = after, event
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: CallFuture | None = None
        self._finished: threading.Event | None = None
        if after is not None or event is not None:
            self._finished = threading.Event()
            tickets[-1].add_done_callback(self._finish)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the call, and raise its error. Raises DeadlineError after `timeout` (0: the group's timeout)."""
        try:
            for ticket in self._tickets:
                ticket.wait(timeout if _NO_TIMEOUT < timeout < _AT_MOST else None)
        except PacelineError as error:
            raise in_torch_terms(error, self._terms) from None
        if self._finished is not None:
            self._finished.wait()
            if self._error is not None:
                raise self._error
        return True

    def is_completed(self) -> bool:
        return self._tickets[-1].done() if self._finished is None else self._finished.is_set()

    def exception(self) -> BaseException | None:
        errors = (ticket.exception() for ticket in self._tickets)
        error = next((error for error in errors if error is not None), self._error)
        return None if error is None else in_torch_terms(error, self._terms)

    def get_future(self) -> CallFuture:
        """Return a future of the filled tensors. Callbacks may make calls: see :class:`CallFuture`."""
        with self._lock:
            if self._future is None:
                self._future = CallFuture()
                self._tickets[-1].add_done_callback(self._complete)
        return self._future

    def _complete(self, _: CollectiveTicket) -> None:
        assert self._future is not None
        if self._finished is not None:
            self._finished.wait()  # `after` may still be running although the ticket is done
        error = self.exception()
        if error is not None:
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._future.fail(failure, is_one_tensor=False)
        else:
            self._future.set_result(list(self._value))

    def _finish(self, _: CollectiveTicket) -> None:
        assert self._finished is not None
        try:
            if self._after is not None and self.exception() is None:
                self._after()
        except BaseException as error:  # the group's thread would only log the error
            self._error = error
        self._after = None
        if self._event is not None:
            self._event.end()
        self._finished.set()


class MessageWork(CallWork):
    """A pending send or receive."""

    def __init__(
        self, ticket: CollectiveTicket, value: Value, terms: Terms, event: TracedOperation | None = None
    ) -> None:
        super().__init__(value)
        self._ticket, self._terms, self._event = ticket, terms, event
        self._lock = threading.Lock()
        self._future: CallFuture | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the message. Cancel the send or receive after `timeout` (0: the group's timeout)."""
        try:
            self._ticket.wait(timeout if _NO_TIMEOUT < timeout < _AT_MOST else None)
        except PacelineError as error:
            raise in_torch_terms(error, self._terms) from None
        finally:
            with self._lock:
                event, self._event = self._event, None
            if event is not None:
                event.end()
        return True

    def is_completed(self) -> bool:
        try:
            return self._ticket.done()
        except PacelineError:
            return True

    def exception(self) -> BaseException | None:
        if self.is_completed():
            try:
                self.wait()
            except PacelineError as error:
                return error
        return None

    def source_rank(self) -> int:
        return int(self._ticket.result())

    _source_rank = source_rank

    def get_future(self) -> CallFuture:
        """Return a future of the tensor. A new thread waits for the message and completes the future."""
        with self._lock:
            if self._future is None:
                self._future = CallFuture()
                waiter = threading.Thread(target=self._complete, name="paceline-message", daemon=True)
                waiter.start()
        return self._future

    def _complete(self) -> None:
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:  # set the error, because otherwise the future would never be done
            self._future.fail(error, is_one_tensor=False)
        else:
            self._future.set_result(list(self._value))


def through_host(call: Callable[..., Work], arguments: Sequence[Any]) -> Work:
    """Run `call` on host copies of the tensors; then copy the host copies of the first argument back."""
    copies: list[tuple[Tensor, Tensor]] = []

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            copies.append((value, value.detach().to("cpu", copy=True)))
            return copies[-1][1]
        return [copied(part) for part in value] if isinstance(value, (list, tuple)) else value

    results = copied(arguments[0])
    filled = copies.copy()
    return HostWork(call(results, *(copied(argument) for argument in arguments[1:])), filled)


class HostWork(CallWork):
    """A call on host copies. `filled` has each device tensor that the call fills, and the tensor's host copy."""

    def __init__(self, call: Work, filled: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__([tensor for tensor, _ in filled])
        self._call, self._filled = call, filled
        self._lock = threading.Lock()
        self._is_copied = False
        if call.is_success():
            self._copy()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._call.wait(timeout)
        self._copy()
        return True

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def exception(self) -> Any:
        return self._call.exception()

    def source_rank(self) -> int:
        return self._call.source_rank()

    _source_rank = source_rank

    def get_future(self) -> CallFuture:
        future = CallFuture(devices=list({tensor.device for tensor, _ in self._filled if tensor.is_cuda}))

        def complete(_: Any) -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # the group's thread would only log the error
                future.fail(error, is_one_tensor=False)

        self._call.get_future().add_done_callback(complete)
        return future

    def _copy(self) -> None:
        with self._lock:
            if not self._is_copied:
                for tensor, copy in self._filled:
                    tensor.data.copy_(copy)
                for device in {tensor.device for tensor, _ in self._filled if tensor.is_cuda}:
                    torch.cuda.current_stream(device).synchronize()
                self._is_copied = True
