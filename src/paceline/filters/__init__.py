"""Filters for messages between workers and servers, one per file. :mod:`.base` explains them."""

from .base import FILTERS, ByteFilter, Filter, KeyFilter, RowFilter, ValueFilter
from .bfloat16 import BFloat16
from .chain import FilterChain, parse_filters
from .compress import Compress
from .float16 import Float16
from .keys import DeltaKeys, KeyCaching, KeyNumbers
from .kkt import KKT
from .quantize import Quantize
from .random_k import RandomK
from .random_skip import RandomSkip
from .significant import Significant
from .top_k import TopK
from .zstd import Zstd

__all__ = [
    "BFloat16",
    "ByteFilter",
    "FilterChain",
    "Compress",
    "DeltaKeys",
    "FILTERS",
    "Filter",
    "Float16",
    "KKT",
    "KeyCaching",
    "KeyFilter",
    "KeyNumbers",
    "Quantize",
    "RandomK",
    "RandomSkip",
    "RowFilter",
    "Significant",
    "TopK",
    "ValueFilter",
    "Zstd",
    "parse_filters",
]
