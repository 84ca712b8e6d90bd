"""Text as windows of tokens: what is fed, what is counted, where documents begin, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from qtool.data.labels import IGNORED
from qtool.data.specs import EMBEDDED, load_data
from qtool.data.text import Windows, read_text
from qtool.errors import QtoolError, UsageError


def test_windows_cover_the_text_once_and_targets_are_the_next_token(tmp_path: Path) -> None:
    text = "".join(chr(33 + i % 90) for i in range(1000))
    (tmp_path / "t.txt").write_text(text)
    found = read_text(f"{tmp_path / 't.txt'}:16")
    windows = [window for part in ("train", "validation", "test") for window in found.parts[part]]
    inputs, targets = (torch.cat(side) for side in zip(*windows, strict=True))
    counted = targets != IGNORED
    assert bytes(targets[counted].tolist()).decode() == text[1:]
    assert bytes(inputs[:1000].tolist()).decode() == text
    assert int(counted.sum()) == 999
    assert not counted[999:].any()
    assert [len(found.parts[part]) for part in ("train", "validation", "test")] == [51, 6, 6]


def test_documents_are_joined_and_their_first_token_is_not_predicted(tmp_path: Path) -> None:
    for name, text in (("b.txt", "world"), ("a.txt", "hello"), ("c.md", "no")):
        (tmp_path / name).write_text(text)
    found = read_text(f"{tmp_path}:2")
    stream = found.parts["train"].stream
    assert bytes(stream.tolist()) == b"hello\0world"
    whole = Windows(stream, found.parts["train"].begins, 10, 0, 1)[0]
    assert whole[0].tolist() == list(b"hello\0worl")
    assert whole[1].tolist() == [*b"ello\0", IGNORED, *b"orld"]


def test_a_tokenizer_file_gives_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 5}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tok.json"))
    for name in ("1.txt", "2.txt"):
        (tmp_path / name).write_text("a b c a b")
    data = load_data(f"text:{tmp_path}:3:{tmp_path / 'tok.json'}")
    assert data.num_classes == 6
    assert data.train.stream.tolist() == [1, 2, 5, 1, 2, 0, 1, 2, 5, 1, 2]  # type: ignore[attr-defined]
    (tmp_path / "tok.json").write_text("{}")
    with pytest.raises(QtoolError, match=r"tokenizer.*expected a tokenizer\.json"):
        load_data(f"text:{tmp_path}:3:{tmp_path / 'tok.json'}")


def test_a_tokenizer_that_cuts_and_pads_sentences_gives_all_of_a_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(max_length=4)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tok.json"))
    (tmp_path / "t.txt").write_text("a b " * 10)
    text = read_text(f"{tmp_path / 't.txt'}:4:{tmp_path / 'tok.json'}")
    assert text.parts["train"].stream.tolist() == [1, 2] * 10


def test_what_a_tokenizer_has_no_token_for_is_told(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tok.json"))
    (tmp_path / "t.txt").write_text("a b c")
    with pytest.raises(QtoolError, match=r"tok\.json': expected tokens for all of the text; got .*WordLevel"):
        load_data(f"text:{tmp_path / 't.txt'}:3:{tmp_path / 'tok.json'}")


def test_a_mark_of_the_order_of_bytes_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some words", encoding="utf-8-sig")
    assert bytes(read_text(f"{tmp_path / 't.txt'}:2").parts["train"].stream.tolist()) == b"some words"


def test_the_identity_follows_text_and_length(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some words " * 9)
    first, again, other = (load_data(f"text:{tmp_path / 't.txt'}:{n}").identity for n in (8, 8, 9))
    assert first == again != other


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hi")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 99)
    (tmp_path / "none").mkdir()
    with pytest.raises(QtoolError, match="at least 3 windows; got 2 tokens, 1 windows of 128"):
        load_data(f"text:{tmp_path / 'short.txt'}")
    with pytest.raises(QtoolError, match="in UTF-8"):
        load_data(f"text:{tmp_path / 'latin.txt'}")
    with pytest.raises(QtoolError, match="none; name the file itself"):
        load_data(f"text:{tmp_path / 'none'}")
    with pytest.raises(UsageError, match=r"did you mean 'short\.txt'"):
        load_data(f"text:{tmp_path / 'shot.txt'}")
    with pytest.raises(UsageError, match="windows of at least 1 token"):
        load_data(f"text:{tmp_path / 'short.txt'}:0")


def test_the_embedded_text_is_the_one_its_readme_names() -> None:
    folder = EMBEDDED / "alice"
    text = (folder / "alice.txt").read_bytes()
    assert f"{len(text):,} bytes of ASCII" in (folder / "README.md").read_text()
    source = b"\n\n\n\n" + text  # the corpus's file, put back together
    source = source.replace(b"\n", b"\r\n") + b"\x1a"
    assert hashlib.sha256(source).hexdigest() in (folder / "README.md").read_text()
    assert load_data("alice:64").train[0][0].shape == (64,)
    assert load_data("alice").num_classes == 256
