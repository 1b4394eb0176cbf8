"""Kernels for :mod:`.json_lines` that find the end of a number, and that write its spelling as a category."""

from __future__ import annotations

from paceline.kernels.jit import uncounted
from paceline.kernels.text.bytes import byte_at

_MINUS, _DOT = 45, 46
_MOST_PLACES, _LEAST_PLACE = 18, -5  # without an exponent, the decimal point is at most and at least at these places


@uncounted()
def _digits_end(text, at):  # type: ignore[no-untyped-def]
    while 48 <= byte_at(text, at) <= 57:
        at += 1
    return at


@uncounted()
def number_end(text, at):  # type: ignore[no-untyped-def]
    """Return the position after the JSON number at `at`, or -1 if there is no number at `at`."""
    if byte_at(text, at) == _MINUS:
        at += 1
    first = at
    at = _digits_end(text, at)
    if at == first or (at > first + 1 and byte_at(text, first) == 48):
        return -1
    if byte_at(text, at) == _DOT:
        first = at + 1
        at = _digits_end(text, first)
        if at == first:
            return -1
    if byte_at(text, at) in (69, 101):
        at += 1
        if byte_at(text, at) in (43, _MINUS):
            at += 1
        first = at
        at = _digits_end(text, first)
        if at == first:
            return -1
    return at


@uncounted()
def _put_digits(text, at, stop, skipped, count, scratch, to):  # type: ignore[no-untyped-def]
    """Copy `count` digits of ``text[at:stop]`` to `scratch`, without the first `skipped` digits.

    If there are fewer digits, zeros are appended.
    """
    while count > 0:
        byte = 48
        while at < stop:
            byte = byte_at(text, at)
            at += 1
            if byte != _DOT:
                skipped -= 1
                if skipped < 0:
                    break
            byte = 48
        scratch[to] = byte
        to += 1
        count -= 1
    return to


@uncounted()
def canonical_number(text, first, stop, scratch, to):  # type: ignore[no-untyped-def]
    """Return the spelling of the number ``text[first:stop]`` as a category: (first, stop, whether it is in `scratch`).

    A spelling that differs from the text is written to `scratch` from `to` on. The reference implementation is
    :func:`paceline.kernels.text.values.number_text`.
    """
    start = first + 1 if byte_at(text, first) == _MINUS else first
    end, point, zeros, digits, shown, exponent = start, -1, 0, 0, 0, 0
    while end < stop and byte_at(text, end) not in (69, 101):
        byte = byte_at(text, end)
        if byte == _DOT:
            point = digits
        else:
            digits += 1
            if byte != 48:
                shown = digits
            elif shown == 0:
                zeros += 1
        end += 1
    if point < 0 and end == stop:
        return first, stop, False
    if shown == 0:
        scratch[to] = 48
        return to, to + 1, True
    if end < stop:
        at = end + 1
        is_negative = byte_at(text, at) == _MINUS
        if is_negative or byte_at(text, at) == 43:
            at += 1
        while at < stop:
            exponent = min(exponent * 10 + byte_at(text, at) - 48, 100_000)
            at += 1
        if is_negative:
            exponent = -exponent
    place = (point if point >= 0 else digits) - zeros + exponent  # digits before the point, without leading zeros
    count = shown - zeros
    begin, to_begin = start, to
    if start > first:
        scratch[to] = _MINUS
        to += 1
    if place > _MOST_PLACES or place < _LEAST_PLACE:
        to = _put_digits(text, begin, end, zeros, 1, scratch, to)
        if count > 1:
            scratch[to] = _DOT
            to = _put_digits(text, begin, end, zeros + 1, count - 1, scratch, to + 1)
        power = place - 1
        scratch[to] = 101
        scratch[to + 1] = 43 if power >= 0 else _MINUS
        to += 2
        power = abs(power)
        size = 10 if power >= 10 else 1
        while size * 10 <= power:
            size *= 10
        while size > 0:
            scratch[to] = 48 + power // size % 10
            to += 1
            size //= 10
    elif place <= 0:
        scratch[to], scratch[to + 1] = 48, _DOT
        to += 2
        for _ in range(-place):
            scratch[to] = 48
            to += 1
        to = _put_digits(text, begin, end, zeros, count, scratch, to)
    else:
        to = _put_digits(text, begin, end, zeros, min(place, count), scratch, to)
        for _ in range(place - count):
            scratch[to] = 48
            to += 1
        if count > place:
            scratch[to] = _DOT
            to = _put_digits(text, begin, end, zeros + place, count - place, scratch, to + 1)
    return to_begin, to, True
