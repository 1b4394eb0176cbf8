"""Prose and names are plain English: few unusual phrasings and names per 1,000, in every package and page.

The lists have phrasings that are hundreds of times rarer in other libraries: Starlette has 0.0 of them per 1,000 words,
scikit-learn 0.5, torch.distributed 0.8 and Hypothesis 1.9. A sentence is plain if a colleague who has never seen the
code understands it at the first reading; a low count alone does not make it so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pages import PAGES, ROOT
from tests.syntax_trees import parse

PACKAGES = sorted(path.parent for path in (ROOT / "src/paceline").glob("*/__init__.py"))
MOST_PHRASES = MOST_NAMES = 4.0
"""Per 1,000, in a package or page."""

PHRASES = [
    r"what (?!if\b|'s\b|happens\b|to do\b|you\b)\w+",
    r"nobody|somebody|everybody|whoever|whomever|whom|whosoever",
    r"told|tells|hears?|heard|bids?|bidden|says|said|asked|knows",
    r"that of|those of|those that|the one that|one that is|of which",
    r"of (it|them|those|these)|nothing of|all of it",
    r"is gone|are gone|is there|are there|there is (none|no more)|is no(?! longer)|are no(?! longer)|any more",
    r"behind|beside",
    r"so (many|much|far|long)(?! as\b| that\b)|as far as|as (it|they) (is|are|was|were)|by itself|at once|under way",
    r"on (its|their) way|from now on|goes on|go on",
    r"anew|alike|meanwhile|besides|hitherto|thereof|thereby|therein|whole of",
    r"takes? note|sees? to it|it may be that|be it|lest|save for",
]
COMMENT = re.compile(r"(?:^ *|  )#:? (.*)$", re.MULTILINE)
PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
WORDS = frozenset(
    re.findall(
        r"\w+",
        """tell tells told untold hear heard unheard say says said ask asks asked bid bids nobody somebody whoever
        others theirs ours mine its gone begun settle settled look looks lose behind beside what whose whom who some
        each alike anew heed ails kin bent awaited thrown taker whole rest their them they this that those these here
        there now""",
    )
)
"""Words that are not parts of names."""


def texts(source: str, tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings, messages (strings of four words or more) and comments of a module."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and len(re.findall(r"[A-Za-z]{2,}", node.value)) > 3
        ):
            yield node.value
    yield from COMMENT.findall(source)


def names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_unusual(name: str) -> bool:
    return any(part.lower() in WORDS for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def count(prose: Iterator[str]) -> tuple[float, list[str]]:
    """Return unusual phrasings per 1,000 words, and the lines that have them."""
    num_words, found = 0, []
    for text in prose:
        num_words += len(text.split())
        found += [f"{match[0]!r} in {' '.join(text.split())[:100]!r}" for match in PHRASE.finditer(text)]
    return 1000 * len(found) / max(num_words, 1), found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package(package: Path) -> None:
    prose: list[str] = []
    defined: list[str] = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = parse(path)
        prose += texts(source, tree)
        defined += names(tree)
    rate, found = count(iter(prose))
    assert rate <= MOST_PHRASES, "\n".join(found[:40])
    unusual = [name for name in defined if is_unusual(name)]
    assert 1000 * len(unusual) <= MOST_NAMES * len(defined), sorted(set(unusual))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    rate, found = count(iter(re.sub(r"`[^`]*`", "", text).splitlines()))
    assert rate <= MOST_PHRASES or len(found) <= 2, "\n".join(found)


def test_the_lists_find_old_sentences() -> None:
    old = ["What is there now, nobody knows.", "Those of them that somebody knows by name.", "Take note: it is gone."]
    assert all(count(iter([sentence]))[0] > MOST_PHRASES for sentence in old)
    assert [name for name in ("told", "others", "ask_now", "num_rows", "item") if is_unusual(name)] == [
        "told",
        "others",
        "ask_now",
    ]
