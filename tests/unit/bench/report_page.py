"""A report as a test reads it."""

from html.parser import HTMLParser
from typing import Any

from cluster.bench.report.svg import shown

VOID = {"meta", "link"}


class Page(HTMLParser):
    """The cells of tables that show a figure, and whether each element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, tuple[str, str]] = {}
        self.tags: list[str] = []
        self._open: list[str] = []
        self._path = ""
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        given = dict(attrs)
        self._path = given.get("data-path") or ""
        if self._path:
            self.figures[self._path] = (given["data-value"] or "", "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._path = ""

    def handle_data(self, data: str) -> None:
        if self._path:
            value, text = self.figures[self._path]
            self.figures[self._path] = (value, text + data)


def at(whole: Any, path: str) -> Any:
    for key in path.split("."):
        whole = whole[int(key)] if isinstance(whole, list) else whole[key]
    return whole


def assert_shows(text: str, whole: dict[str, Any]) -> None:
    """That each figure of the page is that of the results, and is shown as it."""
    figures = Page(text).figures
    assert len(figures) > 100
    for path, (value, said) in figures.items():
        assert float(value) == at(whole, path)
        assert said.strip() == shown(at(whole, path)), path
