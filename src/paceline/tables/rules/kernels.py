"""The loops over rows and elements that apply update rules. One compilation serves all rules of this package.

A table stores the number of its rule. For the rules in :data:`RULES`, this module generates a function that compares
this number with the number of each rule, and calls the kernel of the equal one. The compiler inlines the kernels. So
one `push` for all rules is compiled and loaded from the cache, instead of one for each rule. Some rules have their own
loop in `push` (:attr:`UpdateRule.wide_loop`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import numpy as np

from paceline.kernels import dense, sparse
from paceline.kernels.index import DIM, ENTRY_WORDS, INLINE, LINE_BYTES, ROW_WORDS, RULE, SLOTS
from paceline.kernels.jit import inlined, njit, uncounted
from paceline.kernels.parameters import COUNT_PLANE, MAXIMIZE
from paceline.tables.rules.base import RULES, UpdateRule, rule_kernel

_F0 = np.float32(0)
_loop: Final = inlined()


@cache
def _make_update(kernel: Any, counts: str) -> Any:
    """Return a kernel that applies a rule to elements of a record. It calls the rule's own `kernel`.

    The own kernel receives unsigned indices. For signed indices Numba adds the length to negative indices, which
    prevents vectorized loops.
    """

    @rule_kernel
    def update_once(record, dim, start, stop, grads, at, hyper, per_element):  # type: ignore[no-untyped-def]
        sign = np.float32(-1.0 if hyper[MAXIMIZE] != 0.0 else 1.0)
        places = np.uint64(dim), np.uint64(start), np.uint64(stop)
        kernel(record, *places, grads, np.uint64(at), hyper, sign, 1.0)

    @rule_kernel
    def update_runs(record, dim, start, stop, grads, at, hyper, per_element):  # type: ignore[no-untyped-def]
        # A row of a sparse table has one step count. A dense table has a step count for each element.
        sign = np.float32(-1.0 if hyper[MAXIMIZE] != 0.0 else 1.0)
        count, begin = np.int64(hyper[COUNT_PLANE]) * dim, start
        while begin < stop:
            place, end = count, stop
            if per_element:  # elements with equal step counts are updated together
                place, end = count + begin, begin + 1
                while end < stop and record[count + end] == record[place]:
                    end += 1
            step = np.float64(record[place]) + 1.0
            places = np.uint64(dim), np.uint64(begin), np.uint64(end)
            kernel(record, *places, grads, np.uint64(at + begin - start), hyper, sign, step)
            if per_element:
                for j in range(begin, end):
                    record[count + j] = np.float32(step)
            else:
                record[place] = np.float32(step)
            begin = end

    @rule_kernel
    def update(record, dim, start, stop, grads, at, hyper, per_element):  # type: ignore[no-untyped-def]
        if hyper[COUNT_PLANE] > 0.0:
            update_runs(record, dim, start, stop, grads, at, hyper, per_element)
        else:
            update_once(record, dim, start, stop, grads, at, hyper, per_element)

    return {"never": update_once, "always": update_runs, "by settings": update}[counts]


def _make_row_update(update: Any) -> Any:
    """Return a kernel that applies a rule to a row."""

    @rule_kernel
    def update_row(rule, record, dim, grads, hyper):  # type: ignore[no-untyped-def]
        update(record, dim, 0, dim, grads, 0, hyper, False)

    return update_row


def _make_narrow_loop(rule: type[UpdateRule]) -> Any:
    """Return a kernel that updates rows of one value by `rule`. The kernel returns -1 if rows have a step count."""
    words, entry_words = rule.narrow_words, sparse.entry_words(rule.narrow_words)
    slots, entry_bytes = LINE_BYTES // (4 * entry_words), np.uint64(4 * entry_words)
    update = _make_row_update(_UPDATES[rule])

    @_loop
    def push(directory, layout, parameters, keys, grads, scratch):  # type: ignore[no-untyped-def]
        if layout[ROW_WORDS] != words or layout[ENTRY_WORDS] != entry_words:
            return -1
        sizes = (slots, entry_bytes, 1, words)
        return sparse.push_narrow(directory, layout, parameters, keys, grads, scratch, sizes, update, _start_state)

    return push


def _make_wide_loop(rule: type[UpdateRule]) -> Any:
    """Return a kernel that updates rows of several values by `rule`."""
    update = _make_row_update(_UPDATES[rule])

    @_loop
    def push(directory, layout, parameters, keys, grads, scratch):  # type: ignore[no-untyped-def]
        return sparse.push_wide(directory, layout, parameters, keys, grads, scratch, update, _start_state)

    return push


def _make_choice(parameters: str, kernels: Iterable[tuple[type[UpdateRule], Any]], otherwise: Any = None) -> Any:
    """Return a function that passes its `parameters` to the kernel of the rule with a given number.

    The source of the function is generated as text, with a branch for each rule. The alternative is a chain of
    functions with one rule each, in which Numba would compile the last function once for each function of the chain.
    """
    names: dict[str, Any] = {}
    lines = [f"def choose(rule, {parameters}):"]
    codes: dict[Any, list[int]] = {}  # the numbers of the rules that use each kernel
    for rule, kernel in kernels:
        codes.setdefault(kernel, []).append(rule.code)
    for number, (kernel, rule_codes) in enumerate(codes.items()):
        names[f"kernel_{number}"] = kernel
        test = " or ".join(f"rule == {code}" for code in rule_codes)
        lines.append(f"    if {test}: return kernel_{number}({parameters})")
    exec("\n".join([*lines, f"    return {otherwise}"]), names)
    return names["choose"]


_UPDATES: Final = {rule: _make_update(rule.update, rule.counts) for rule in RULES.values()}
_update_elements: Final = rule_kernel(
    _make_choice("record, dim, start, stop, grads, at, hyper, per_element", _UPDATES.items())
)
_initialize: Final = rule_kernel(
    _make_choice(
        "record, dim, start, stop, hyper",
        [(rule, rule.initialize) for rule in RULES.values() if rule.initialize is not None],
    )
)


@uncounted(nogil=True, error_model="numpy")
def _update_row(rule, record, dim, grads, hyper):  # type: ignore[no-untyped-def]
    """Apply gradients to a row by the rule with the number `rule`. The function is too large to be inlined."""
    _update_elements(rule, record, dim, 0, dim, grads, 0, hyper, False)


@uncounted(nogil=True, error_model="numpy")
def _start_state(rule, record, words, dim, start, stop, hyper):  # type: ignore[no-untyped-def]
    """Set the state of elements ``[start, stop)`` to the state before the first update.

    Their values are set already.
    """
    for plane in range(dim, words, dim):
        for j in range(start, min(stop, words - plane)):
            record[plane + j] = _F0
    _initialize(rule, record, dim, start, stop, hyper)


# If a user's program defines a rule, the kernels are not cached, because the cache does not detect changes of the rule.
_only_builtin_rules: Final = all(rule.__module__.startswith(f"{__package__}.") for rule in RULES.values())
_PUSH: Final = "directory, layout, parameters, keys, grads, scratch"
_push_narrow: Final = _loop(
    _make_choice(_PUSH, [(rule, _make_narrow_loop(rule)) for rule in RULES.values() if rule.narrow_words], -1)
)
_push_wide: Final = _loop(
    _make_choice(_PUSH, [(rule, _make_wide_loop(rule)) for rule in RULES.values() if rule.wide_loop], -1)
)


@_loop
def _push(directory, layout, parameters, keys, grads, first, scratch):  # type: ignore[no-untyped-def]
    dim, done = layout[DIM], -1
    keys, grads = keys[first:], grads[first * dim :]
    if layout[INLINE] == 1:
        if dim == 1:
            done = _push_narrow(layout[RULE], directory, layout, parameters, keys, grads, scratch)
        if done < 0:
            sizes = (layout[SLOTS], sparse.bytes_of_entry(layout), dim, layout[ROW_WORDS])
            done = sparse.push_narrow(
                directory, layout, parameters, keys, grads, scratch, sizes, _update_row, _start_state
            )
    else:
        done = _push_wide(layout[RULE], directory, layout, parameters, keys, grads, scratch)
        if done < 0:
            done = sparse.push_wide(directory, layout, parameters, keys, grads, scratch, _update_row, _start_state)
    return first + done


@njit(cache=_only_builtin_rules, nogil=True)
def push(directory, layout, parameters, keys, grads, first):  # type: ignore[no-untyped-def]
    """Update the rows of ``keys[first:]`` with the gradients `grads` (float32 [n * dim]), and create absent rows.

    Return len(keys) if all rows are updated. Otherwise return the position of a key whose bucket must grow first.
    """
    return _push(directory, layout, parameters, keys, grads, first, np.empty(sparse.SCRATCH, np.uint64))


@njit(cache=_only_builtin_rules, nogil=True)
def dense_start(rule, record, size, start, stop, first_key, kind, seed, parameters):  # type: ignore[no-untyped-def]
    """Set elements of a dense table to initial values and state by :func:`paceline.kernels.dense.start_range`."""
    dense.start_range(rule, record, size, start, stop, first_key, kind, seed, parameters, _start_state)


@njit(cache=_only_builtin_rules, nogil=True)
def dense_push(rule, record, size, start, stop, grads, at, parameters):  # type: ignore[no-untyped-def]
    """Update a range of a dense table by :func:`paceline.kernels.dense.push_range`."""
    dense.push_range(rule, record, size, start, stop, grads, at, parameters, _update_elements)


@njit(cache=_only_builtin_rules, nogil=True)
def dense_push_at(rule, record, size, positions, grads, parameters):  # type: ignore[no-untyped-def]
    """Update elements of a dense table at positions by :func:`paceline.kernels.dense.push_at`."""
    dense.push_at(rule, record, size, positions, grads, parameters, _update_elements)


KERNELS: Final = (push, dense_start, dense_push, dense_push_at)
"""The kernels that are called from Python."""
