from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from qtool.reporting.markup import Markup, el


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\x00", exclude_categories=["Cs", "Cc"])))
def test_text_and_attributes_come_back_as_they_were(text):
    read = Reader(el("p", text, title=text))
    assert read.text == text
    assert read.tags == [("p", {"title": text})]


def test_markup_is_kept_and_text_is_not_taken_for_it():
    assert el("p", el("b", "x"), "<b>y</b>") == "<p><b>x</b>&lt;b&gt;y&lt;/b&gt;</p>"
    assert el("p", Markup("<i>z</i>")) == "<p><i>z</i></p>"


def test_lists_are_laid_out_and_none_is_left_out():
    assert el("p", [1, [2.5, None]], None, "") == "<p>12.5</p>"
    assert el("p", cls=None, tabindex=0) == '<p tabindex="0"></p>'


def test_numbers_in_attributes_are_short():
    assert el("line", x1=1.0, x2=2.345678, stroke_width=0.5) == '<line x1="1" x2="2.35" stroke-width="0.5"/>'
