"""Read click logs. A file is read as shards, and a shard as minibatches of sparse examples.

``open_dataset(paths)`` detects the format and returns a :class:`Dataset`; ``dataset.read(file, shard, batch_size)``
yields :class:`Batch`. The parsers are kernels (:mod:`paceline.kernels.text`), which are imported at the first read.
``write_click_log(path)`` writes a synthetic log whose best possible AUC is known.
"""

from paceline.data.bad_lines import BadLine, BadLines
from paceline.data.batch import Batch
from paceline.data.binary.converted import ConvertedFile, DataWriter, Description, describe_converted, merge_guesses
from paceline.data.columns import Columns, Guess, Guesses, find_label
from paceline.data.dataset import Dataset, Spec, open_dataset, open_spec
from paceline.data.dialect import LABEL_NAMES
from paceline.data.formats import (
    CONVERTED,
    FORMATS,
    Format,
    detect_format,
    find_format,
    have_same_features,
    source_format,
)
from paceline.data.guessing import describe_named, guess_columns
from paceline.data.labels import count_labels, describe_not_binary
from paceline.data.sampling import Sample, TextTable
from paceline.data.scales.scaling import KEPT_SCALES, NUMERIC_SCALES, Scale, check_numeric_scale, fit_numbers, fit_scale
from paceline.data.streams import line_number
from paceline.data.synthetic import ClickLogSpec, ClickLogTruth, write_click_log

__all__ = [
    "BadLine",
    "BadLines",
    "Batch",
    "CONVERTED",
    "ClickLogSpec",
    "ClickLogTruth",
    "Columns",
    "ConvertedFile",
    "DataWriter",
    "Dataset",
    "Description",
    "FORMATS",
    "Format",
    "Guess",
    "Guesses",
    "KEPT_SCALES",
    "LABEL_NAMES",
    "NUMERIC_SCALES",
    "Sample",
    "Scale",
    "Spec",
    "TextTable",
    "check_numeric_scale",
    "count_labels",
    "describe_converted",
    "describe_named",
    "describe_not_binary",
    "detect_format",
    "find_format",
    "find_label",
    "fit_numbers",
    "fit_scale",
    "guess_columns",
    "have_same_features",
    "line_number",
    "merge_guesses",
    "open_dataset",
    "open_spec",
    "source_format",
    "write_click_log",
]
