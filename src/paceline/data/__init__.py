"""Readers of click logs: files to shards, shards to minibatches of sparse examples.

``open_dataset(paths)`` finds the format and gives a :class:`Dataset`; ``dataset.read(file, shard,
batch_size)`` yields :class:`Batch`. Parsing is done by :mod:`paceline.kernels.text`, which is imported when
something is read. ``write_click_log(path)`` makes a log up whose best possible AUC is known.
"""

from paceline.data.bad_lines import BadLine, BadLines
from paceline.data.batch import Batch
from paceline.data.binary.converted import ConvertedFile, DataWriter, Description, describe_converted, merge_guesses
from paceline.data.columns import Columns, Guess, Guesses, find_label
from paceline.data.dataset import Dataset, Spec, open_dataset, open_spec
from paceline.data.dialect import LABEL_NAMES
from paceline.data.formats import (
    COLUMN_FORMATS,
    CONVERTED,
    FORMATS,
    KEYED_FORMATS,
    detect_format,
    have_same_features,
    is_unlabelled_criteo,
    source_format,
)
from paceline.data.guessing import describe_named, guess_columns
from paceline.data.labels import count_labels, describe_not_binary
from paceline.data.sampling import Sample, sample_labels, sample_objects, sample_rows
from paceline.data.scales.scaling import KEPT_SCALES, NUMERIC_SCALES, Scale, check_numeric_scale, fit_numbers, fit_scale
from paceline.data.streams import line_number
from paceline.data.synthetic import ClickLogSpec, ClickLogTruth, write_click_log
from paceline.data.tables import column_names

__all__ = [
    "BadLine",
    "BadLines",
    "Batch",
    "COLUMN_FORMATS",
    "CONVERTED",
    "ClickLogSpec",
    "ClickLogTruth",
    "Columns",
    "ConvertedFile",
    "DataWriter",
    "Dataset",
    "Description",
    "FORMATS",
    "Guess",
    "Guesses",
    "KEPT_SCALES",
    "KEYED_FORMATS",
    "LABEL_NAMES",
    "NUMERIC_SCALES",
    "Sample",
    "Scale",
    "Spec",
    "check_numeric_scale",
    "column_names",
    "count_labels",
    "describe_converted",
    "describe_named",
    "describe_not_binary",
    "detect_format",
    "find_label",
    "fit_numbers",
    "fit_scale",
    "guess_columns",
    "have_same_features",
    "is_unlabelled_criteo",
    "line_number",
    "merge_guesses",
    "open_dataset",
    "open_spec",
    "sample_labels",
    "sample_objects",
    "sample_rows",
    "source_format",
    "write_click_log",
]
