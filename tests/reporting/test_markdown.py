from __future__ import annotations

import html

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from qtool.reporting.markdown import escaped, table

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
CHARACTERS = "ab1_*`~<>|[]()\\&;#! /."


@given(st.text(CHARACTERS))
def test_text_is_shown_as_it_was(text):
    text = " ".join(text.split())
    assert html.unescape(READER.renderInline(escaped(text))) == text


def test_a_table_has_the_cells_it_was_given():
    name = "a|b <script>_x_</script> &lt;"
    shown = READER.render("\n".join(table(["", name], [[name, "1 *"]], right=True)))
    assert shown.count(html.escape(name, quote=False)) == 2
    assert '<td style="text-align:right">1 *</td>' in shown
