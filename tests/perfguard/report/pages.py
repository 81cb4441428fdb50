"""A page as the standard library's parser sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "input", "img", "br"}


class Page(HTMLParser):
    """Elements of a page: all tags with their attributes, the cells of each table, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[tuple[str, dict[str, str | None]]]]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.captions: dict[str, str] = {}
        self.text = ""
        self._table = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = attributes["id"] or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append(("", attributes))
        elif tag == "script":
            self.scripts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = self.scripts[-1][0], self.scripts[-1][1] + data
            return
        if "style" in self.open:
            return
        self.text += data
        if "caption" in self.open:
            self.captions[self._table] = self.captions.get(self._table, "") + data
        elif {"td", "th"} & set(self.open):
            cells = self.tables[self._table][-1]
            cells[-1] = cells[-1][0] + data, cells[-1][1]

    def column(self, table: str, head: str) -> list[tuple[str, dict[str, str | None]]]:
        """The cells below the header ``head``: their text, and their attributes."""
        first, *rows = self.tables[table]
        index = [text for text, _ in first].index(head)
        return [row[index] for row in rows]

    def values(self, table: str, head: str) -> list[float | None]:
        """The exact numbers of a column. None: an unknown one."""
        return [
            float(value) if value else None
            for _, attributes in self.column(table, head)
            if (value := attributes["data-value"]) is not None
        ]
