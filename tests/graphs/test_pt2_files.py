"""Opening .pt2 files: whole ones load, damaged ones are refused in one line, and no crafted one ever runs its code."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import threading
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.graphs.programs import as_graph, to_program
from qtool.graphs.pt2_files import check_archive, load_program, save_program

Members = dict[str, bytes]
CONFIG, PROGRAM, INPUTS = "data/weights/model_weights_config.json", "models/model.json", "data/sample_inputs/model.pt"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * x.shape[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    torch.manual_seed(0)
    save_program(to_program(Net(), torch.randn(2, 4)), path)
    return path


@pytest.fixture(scope="module")
def members(whole: Path) -> Members:
    with zipfile.ZipFile(whole) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path: Path, members: Members, root: str = "archive") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(f"{root}/{name}", data)
    return path


class Payload:
    """Unpickling one creates the file ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_whole_file_loads_and_computes_the_same(whole: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    assert torch.equal(as_graph(load_program(whole))(x), model(x))


def test_a_rewritten_archive_of_the_same_members_loads(tmp_path: Path, members: Members) -> None:
    assert load_program(write(tmp_path / "again.pt2", members)).graph is not None


def test_saving_leaves_no_trace_of_the_machine(members: Members) -> None:
    text = b"".join(members.values())
    assert str(Path(__file__).parent).encode() not in text
    assert str(Path(torch.__file__).parent).encode() not in text
    assert b"nn_module_stack" in text  # while the module paths stay


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, whole: Path, share: float) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut.pt2"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(QtoolError, match=r"cut\.pt2.*whole \.pt2 file.*make it again") as caught:
        load_program(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"not a zip at all", pickle.dumps({"a": 1}), saved({"a": torch.ones(1)})])
def test_another_kind_of_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.pt2"
    path.write_bytes(data)
    with pytest.raises(QtoolError):
        load_program(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"none\.pt2.*no file of that name"):
        load_program(tmp_path / "none.pt2")


@pytest.mark.parametrize("name", [PROGRAM, CONFIG, INPUTS, "data/weights/weight_0"])
def test_a_missing_member_is_refused(tmp_path: Path, members: Members, name: str) -> None:
    with pytest.raises(QtoolError):
        load_program(write(tmp_path / "less.pt2", {key: value for key, value in members.items() if key != name}))


def with_pickled_weight(members: Members, data: bytes) -> Members:
    config = json.loads(members[CONFIG])
    for entry in config["config"].values():
        entry["use_pickle"] = True
    return {**members, CONFIG: json.dumps(config).encode(), "data/weights/weight_0": data}


def with_opaque_constant(members: Members, prefix: str, data: bytes) -> Members:
    entry = {"path_name": f"{prefix}_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"x": entry}}).encode()
    return {**members, "data/constants/model_constants_config.json": config, f"data/constants/{prefix}_0": data}


ATTACKS: dict[str, Callable[[Members, Payload], Members]] = {
    "inputs": lambda m, p: {**m, INPUTS: saved(p)},
    "inputs, plain pickle": lambda m, p: {**m, INPUTS: pickle.dumps(p)},
    "weight": lambda m, p: with_pickled_weight(m, saved(p)),
    "weight, protocol 0": lambda m, p: with_pickled_weight(m, pickle.dumps(p, protocol=0)),
    "opaque": lambda m, p: with_opaque_constant(m, "opaque_obj", pickle.dumps(p)),
    "opaque, protocol 0": lambda m, p: with_opaque_constant(m, "opaque_obj", pickle.dumps(p, protocol=0)),
    "scripted": lambda m, p: with_opaque_constant(m, "custom_obj", pickle.dumps(p)),
    "constant": lambda m, p: with_opaque_constant(m, "tensor", saved(p)),
    "older weights": lambda m, p: {**m, "data/weights/model.pt": saved(p)},
    "older constants": lambda m, p: {**m, "data/constants/model.pt": saved(p)},
    "older layout": lambda m, p: {"version": b"8.18", "serialized_state_dict.pt": saved(p)},
    "compiled": lambda m, p: {**m, "data/aotinductor/model/evil.so": b"\x7fELF"},
    "extra": lambda m, p: {**m, "extra/readme.txt": b"hello"},
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_no_member_of_a_crafted_file_is_run(tmp_path: Path, members: Members, name: str) -> None:
    marker = tmp_path / "ran"
    path = write(tmp_path / "crafted.pt2", ATTACKS[name](members, Payload(marker)))
    for read in (check_archive, load_program):
        with pytest.raises(QtoolError, match="could run code from"):
            read(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["inputs", "inputs, plain pickle", "weight", "constant", "older weights"])
def test_a_pickle_is_not_run_even_if_the_check_of_members_missed_it(
    tmp_path: Path, members: Members, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.graphs.pt2_files.check_archive", lambda path: "{}")
    marker = tmp_path / "ran"
    with pytest.raises(QtoolError):
        load_program(write(tmp_path / "crafted.pt2", ATTACKS[name](members, Payload(marker))))
    assert not marker.exists()


def edited(members: Members, change: Callable[[dict[str, Any]], None]) -> Members:
    program = json.loads(members[PROGRAM])
    change(program)
    return {**members, PROGRAM: json.dumps(program).encode()}


def first_node(program: dict[str, Any]) -> dict[str, Any]:
    return program["graph_module"]["graph"]["nodes"][0]


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system", "torch.load", "torch.hub.load", "torch.ops.load_library", "torch.ops.aten.__class__.mro",
        "torch.ops.aten.from_file.default", "torch.ops.higher_order.while_loop", "_operator.attrgetter",
        "_operator.call", "math.__loader__", "#extension", "builtins.eval", "", None,
    ],
)  # fmt: skip
def test_an_operator_that_is_no_arithmetic_is_refused(tmp_path: Path, members: Members, target: str | None) -> None:
    crafted = edited(members, lambda program: first_node(program).update(target=target))
    with pytest.raises(QtoolError, match=r"could run code from.*operator"):
        load_program(write(tmp_path / "crafted.pt2", crafted))


def test_the_arithmetic_of_masks_loads(tmp_path: Path) -> None:
    class Masks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x > 0) & (x < 3)) | ((x > 5) ^ (x > 6))

    x = torch.arange(8.0)
    save_program(torch.export.export(Masks(), (x,)), tmp_path / "masks.pt2")
    assert torch.equal(load_program(tmp_path / "masks.pt2").module()(x), Masks()(x))


def test_an_operator_given_as_an_argument_is_refused(tmp_path: Path, members: Members) -> None:
    def change(program: dict[str, Any]) -> None:
        first_node(program)["inputs"][0]["arg"] = {"as_operator": "torch.os.system"}

    with pytest.raises(QtoolError, match="could run code from"):
        load_program(write(tmp_path / "crafted.pt2", edited(members, change)))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {marker}')",
        "exec(chr(1)+chr(2))",
        "Max('__import__(\\'os\\').system(\\'touch {marker}\\')')",
        "Symbol('s0').__class__",
        "(lambda: open('{marker}', 'w'))()",
        "[open('{marker}', 'w') for _ in (1,)]",
        "Symbol('s0' if open('{marker}', 'w') else 's1')",
        "f'{{open}}'",
        "",
    ],
)
def test_a_size_is_never_evaluated_as_python(tmp_path: Path, members: Members, text: str) -> None:
    marker = tmp_path / "ran"
    program = json.loads(members[PROGRAM])
    found = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and "expr_str" in value:
            value["expr_str"] = text.format(marker=marker)
            found.append(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)

    walk(program)
    assert found
    with pytest.raises(QtoolError, match=r"could run code from.*size"):
        load_program(write(tmp_path / "crafted.pt2", {**members, PROGRAM: json.dumps(program).encode()}))
    assert not marker.exists()


def test_an_archive_that_two_readers_read_differently_is_refused(tmp_path: Path, members: Members) -> None:
    path = tmp_path / "twice.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zipfile's own word on names given twice
        write(path, members)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
            archive.writestr(f"archive/{INPUTS}", saved(Payload(tmp_path / "ran")))
    with pytest.raises(QtoolError, match="reads differently twice"):
        load_program(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("before", [None, "0"])
def test_loading_leaves_the_process_as_it_was(
    whole: Path, tmp_path: Path, before: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    load_program(whole)
    with pytest.raises(QtoolError):
        load_program(write(tmp_path / "none.pt2", {}))
    assert os.environ.get(name) == before
    assert not logging.getLogger("torch.export").filters
    assert not caplog.records or all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("silenced", [logging.NOTSET, logging.WARNING])
def test_the_reason_that_torch_only_logs_is_told(tmp_path: Path, members: Members, silenced: int) -> None:
    logging.disable(silenced)
    crafted = edited(
        members, lambda program: first_node(program).update(target="torch.ops.aten.no_such_operator.default")
    )
    try:
        with pytest.raises(QtoolError, match="no_such_operator"):
            load_program(write(tmp_path / "unknown.pt2", crafted))
        assert logging.root.manager.disable == silenced
    finally:
        logging.disable(logging.NOTSET)


def test_threads_that_load_take_turns(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, at_work = torch.export.load, threading.Lock()

    def alone(path: Path) -> Any:
        assert at_work.acquire(blocking=False)
        time.sleep(0.05)  # for another to come in
        try:
            return load(path)
        finally:
            at_work.release()

    monkeypatch.setattr(torch.export, "load", alone)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(load_program, [whole, whole]))) == 2


def test_torchs_writer_proves_nothing_of_a_form_that_it_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._export.serde import serialize

    asked, prove = [], serialize.canonicalize
    monkeypatch.setattr(serialize, "canonicalize", lambda *given: asked.append(given) or prove(*given))
    program, paths = to_program(Net(), torch.randn(2, 4)), [tmp_path / "ours.pt2", tmp_path / "torch.pt2"]
    save_program(program, paths[0])
    assert not asked
    torch.export.save(program, paths[1])
    assert asked
    ours, torchs = (torch._C.PyTorchFileReader(str(path)).get_record(PROGRAM) for path in paths)
    assert ours == torchs


def test_torchs_reader_has_its_own_typing_back(tmp_path):
    import typing

    from torch._export.serde import serialize

    (tmp_path / "broken.pt2").write_bytes(b"no archive")
    with pytest.raises(QtoolError):
        load_program(tmp_path / "broken.pt2")
    assert serialize.typing is typing


class Parts(nn.Module):
    """Two weights that are parts of one tensor, as those of experts are."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(6, 4)
        self.first, self.second = nn.Parameter(whole[:4]), nn.Parameter(whole[2:])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first.T + x @ self.second.T


def test_parts_of_one_tensor_are_stored_without_a_word(tmp_path: Path) -> None:
    model, x = Parts(), torch.randn(3, 4)
    save_program(to_program(model, x), tmp_path / "parts.pt2")
    assert torch.equal(as_graph(load_program(tmp_path / "parts.pt2"))(x), model(x))
