"""Factories: found, executed once from the hashed bytes, and refused when they changed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from qtool.errors import QtoolError, UsageError
from qtool.factories import anchored, factory_sha256, is_factory, load_factory, require_same

SOURCE = "import helper_beside\n\ndef build():\n    return helper_beside.VALUE\n\ndef bad():\n    raise KeyError('x')\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside.py").write_text("VALUE = 41\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    yield path
    sys.modules.pop("helper_beside", None)


@pytest.mark.parametrize("spec", ["a.py:f", "/x/y z/a.py:f", "pkg:f", "pkg.mod:f", r"C:\x\a.py:f"])
def test_factory_specs_are_known(spec: str) -> None:
    assert is_factory(spec)


@pytest.mark.parametrize(
    "spec", ["resnet", "idx:/data", "a.py:", "a.py", ":f", "a.py:1f", "a-b:f", "npz:dir/x", "hf:mnist", "timm:resnet18"]
)
def test_other_specs_are_not(spec: str) -> None:
    assert not is_factory(spec)


def test_a_file_is_executed_and_hashed(file: Path) -> None:
    before = list(sys.path)
    factory = load_factory(f"{file}:build")
    assert factory() == 41
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert factory.file_sha256 == digest
    assert factory_sha256(f"{file}:build") == digest
    assert sys.path == before


def test_a_changed_file_is_executed_anew(file: Path) -> None:
    first = load_factory(f"{file}:build")
    file.write_text("def build():\n    return 7\n")
    assert (first(), load_factory(f"{file}:build")()) == (41, 7)


def test_one_file_is_one_module(file: Path) -> None:
    file.write_text("class A: pass\ndef one():\n    return A\ndef two():\n    return A\n")
    assert load_factory(f"{file}:one")() is load_factory(f"{file}:two")()


def test_copies_of_a_file_are_modules_of_their_own_and_the_first_is_called_alike_in_any_folder(tmp_path: Path) -> None:
    source, found = "from pathlib import Path\ndef place():\n    return Path(__file__).parent, __name__\n", []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "copied.py").write_text(source)
        found.append(load_factory(f"{folder / 'copied.py'}:place")())
    (first, name), (second, other) = found
    assert (first, second, other) == (tmp_path / "a", tmp_path / "b", f"{name}_")
    for loaded in (name, other):
        del sys.modules[loaded]
    assert load_factory(f"{tmp_path / 'b' / 'copied.py'}:place")() == (tmp_path / "b", name)


def test_a_module_of_the_working_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    factory = load_factory("mine:build")
    assert factory() == 41
    assert factory.file_sha256 == factory_sha256("mine:build") == hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.delitem(sys.modules, "mine")


def test_raising_names_file_line_and_exception(file: Path) -> None:
    with pytest.raises(QtoolError, match=r"KeyError: 'x' \(.*mine\.py:7\)") as caught:
        load_factory(f"{file}:bad")()
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_the_line_is_the_users_own_even_when_a_library_raises(file: Path) -> None:
    file.write_text("import json\n\ndef build():\n    return json.loads('{')\n")
    with pytest.raises(QtoolError, match=r"JSONDecodeError: .*\(.*mine\.py:4\)"):
        load_factory(f"{file}:build")()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def build(:\n", r"SyntaxError.*mine\.py:1"),
        ("\n1 / 0\n", r"ZeroDivisionError.*mine\.py:2"),
        ("import nowhere.at_all\n", r"mine\.py:1\); install the package of 'nowhere', or correct that line"),
        ("import sys\nsys.exit()\n", r"sys\.exit\(None\) in .*mine\.py:2; .*__main__"),
    ],
)
def test_a_file_that_does_not_import(file: Path, source: str, told: str) -> None:
    file.write_text(source)
    for _ in range(2):  # a half-made module must not be kept
        with pytest.raises(QtoolError, match=told):
            load_factory(f"{file}:build")


@pytest.mark.filterwarnings("ignore:can.t resolve package:ImportWarning")
def test_a_file_of_a_package_is_named_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kit"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("SIZE = 3\n")
    (package / "net.py").write_text("from .parts import SIZE\ndef build():\n    return SIZE\n")
    with pytest.raises(QtoolError, match=r"net\.py:1\); name it package\.module:factory, from the folder of the"):
        load_factory(f"{package / 'net.py'}:build")
    monkeypatch.chdir(tmp_path)
    assert load_factory("kit.net:build")() == 3


def test_misspelt_names(file: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean 'build'\?"):
        load_factory(f"{file}:biuld")
    with pytest.raises(UsageError, match=r"did you mean 'mine\.py'\?"):
        load_factory(f"{file.parent / 'mien.py'}:build")
    with pytest.raises(UsageError, match=r"installed module 'no_such_package\.sub'"):
        load_factory("no_such_package.sub:build")
    with pytest.raises(UsageError, match="a function 'VALUE'"):
        load_factory(f"{file.parent / 'helper_beside.py'}:VALUE")


def test_a_recorded_factory_is_refused_when_its_file_changed(file: Path) -> None:
    record = {"spec": f"{file}:build", "file_sha256": factory_sha256(f"{file}:build")}
    require_same(record)
    file.write_text(SOURCE + "# changed\n")
    with pytest.raises(QtoolError, match="--trust"):
        require_same(record)
    require_same(record, trust=True)


def test_refusing_executes_nothing(file: Path) -> None:
    record = {"spec": f"{file}:build", "file_sha256": factory_sha256(f"{file}:build")}
    mark = file.parent / "executed"
    file.write_text(f"open({str(mark)!r}, 'w').close()\n")
    with pytest.raises(QtoolError):
        require_same(record)
    assert not mark.exists()


def test_specs_mean_the_same_from_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert anchored("net.py:build") == f"{tmp_path}/net.py:build"
    assert anchored("idx:data") == f"idx:{tmp_path}/data"
    assert anchored("imagefolder:data:64") == f"imagefolder:{tmp_path}/data:64"
    assert anchored("hf:cifar10:train") == "hf:cifar10:train"
    (tmp_path / "own").mkdir()
    assert anchored("hf:own:train") == f"hf:{tmp_path}/own:train"
    assert (anchored("hf:own"), anchored("transformers:own")) == (f"hf:{tmp_path}/own", f"transformers:{tmp_path}/own")
    assert anchored("package.module:build") == "package.module:build"
    assert anchored("resnet") == "resnet"
    assert anchored(object()) is None


def test_a_function_that_asks_for_arguments_is_refused_by_their_names(file: Path) -> None:
    file.write_text(
        "def build(width, *rest, depth=2, **more): return width\nclass Net:\n    def __init__(self, a, b): ...\n"
    )
    for name, needed in (("build", "width"), ("Net", "a, b")):
        with pytest.raises(UsageError, match=f"a function that needs no arguments; got one of {needed}; give them"):
            load_factory(f"{file}:{name}")


def test_an_exception_without_words_is_told_by_its_name(file: Path) -> None:
    file.write_text("def build():\n    raise StopIteration\n")
    with pytest.raises(QtoolError, match=r"got StopIteration \(.*mine\.py:2\)"):
        load_factory(f"{file}:build")()
