"""Show clusters, clients, tables and strategies as small tables in notebooks."""

from __future__ import annotations

from abc import abstractmethod
from html import escape
from typing import Any


class NotebookTable:
    """An object that a notebook shows as a table, from the rows of its text. This class is abstract."""

    @abstractmethod
    def described_rows(self) -> dict[str, Any]:
        """Return the properties by name. The values are shown as text."""

    def _repr_html_(self) -> str:
        """Return a table for IPython and Jupyter. All texts are escaped."""
        left = 'style="text-align: left"'
        rows = (
            f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(str(value))}</td></tr>"
            for name, value in self.described_rows().items()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption><tbody>{''.join(rows)}</tbody></table>"
