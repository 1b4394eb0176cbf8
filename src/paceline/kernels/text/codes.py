"""Codes of the text kernels: the faults of malformed lines, and the kinds of csv columns."""

from __future__ import annotations

BAD_FIELDS = 1
BAD_CRITEO_LABEL = 2
BAD_INTEGER = 3
BAD_BYTE = 4
BAD_LABEL = 5
BAD_INDEX = 6
BAD_VALUE = 7

BAD_WIDTH = 8
BAD_QUOTE = 9
NO_LABEL = 10
NO_LABEL_NUMBER = 11
NO_NUMBER = 12
NO_WEIGHT = 13
NO_WEIGHT_NUMBER = 14

DETAIL = 16
"""The fault code of a csv row is one of the last seven codes, plus DETAIL times a number: the number of cells in the
row or the number of the malformed column.
"""

LABEL_SLOT, WEIGHT_SLOT, SKIPPED_SLOT, OPTIONAL_LABEL_SLOT, TEXT_SLOT = -1, -2, -3, -4, -5
"""The slots of csv columns that are not exactly one feature.

A column's *slot* is the position of its feature in a row, or one of these codes. Columns with SKIPPED_SLOT are not
read. If a column has OPTIONAL_LABEL_SLOT, a missing label is NaN. The text columns have the slots TEXT_SLOT, TEXT_SLOT
- 1, TEXT_SLOT - 2 and so on.
"""

NO_BAR, BAD_VW_HEAD, BAD_VW_WEIGHT, BAD_VW_BASE = range(17, 21)
MISSING_LABEL = 22
BAD_JSON, BAD_JSON_LABEL, BAD_JSON_NUMBER, BAD_JSON_WEIGHT, TOO_DEEP, MISSING_WEIGHT, BAD_JSON_CLASS, BAD_TRIPLE = (
    range(23, 31)
)
MAX_DEPTH = 32
"""The maximum depth of nested objects and lists in a line of JSON."""

REASONS = {
    BAD_FIELDS: "it does not have 40 fields with tabs between them",
    BAD_CRITEO_LABEL: "its label is neither 0 nor 1",
    BAD_INTEGER: "one of its 13 integer fields is not an integer of at most 18 digits",
    BAD_BYTE: "it holds a control byte",
    BAD_LABEL: "its label is not a finite number",
    BAD_INDEX: "an index is not an integer from 0 to 2^64-1 with a colon after it",
    BAD_VALUE: "a value is not a finite float32 number",
    NO_BAR: "it has no | before its features",
    BAD_VW_HEAD: "before the first | is something other than a label, a weight and a tag",
    BAD_VW_WEIGHT: "its weight is below 0",
    BAD_VW_BASE: "it has an initial prediction, which is not supported",
    BAD_TRIPLE: "a feature is not field:feature:value with a finite float32 number",
    MISSING_LABEL: "it has no label",
    MISSING_WEIGHT: "it has no weight",
    BAD_JSON: "it is not one object of JSON",
    BAD_JSON_LABEL: "its label is not a finite number, true or false",
    BAD_JSON_CLASS: "its label is not one of the words that the labels are",
    BAD_JSON_NUMBER: "a number is not a finite float32 number",
    BAD_JSON_WEIGHT: "its weight is not a finite number of 0 or more",
    TOO_DEEP: f"it is nested deeper than {MAX_DEPTH} objects and lists",
}
