"""Pickles that would run code: nothing runs, one clear refusal; harmless company is skipped."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import logging
import os
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from otfuse_cli.checkpoint.formats.rebuild import (
    StorageRef,
    TensorRef,
    Unsupported,
    rebuild,
    storage_from_id,
)
from otfuse_cli.checkpoint.formats.symbols import Foreign, Symbol
from otfuse_cli.checkpoint.formats.unpickle import BrokenPickleError, Table, Unpickler
from otfuse_cli.checkpoint.open import open_checkpoint
from otfuse_cli.errors import ExitCode, UnreadableInput, UsageError

STATE = {"w": torch.arange(3.0)}
MAGIC = 0x1950A86A20F9469CFC6C


def short(text: str) -> bytes:
    return b"X" + len(text.encode()).to_bytes(4, "little") + text.encode()


def attacks(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Pickle programs that touch `marker` when a loader runs them, and what each should name."""
    shell = f"touch {marker}"
    python = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    touch = short(shell) + b"\x85R."
    return {
        "os.system": (b"\x80\x02cos\nsystem\n" + touch, "os.system"),
        "posix.system": (b"\x80\x02cposix\nsystem\n" + touch, "posix.system"),
        "eval": (b"\x80\x02cbuiltins\neval\n" + short(python) + b"\x85R.", "builtins.eval"),
        "exec": (b"\x80\x02cbuiltins\nexec\n" + short(python) + b"\x85R.", "builtins.exec"),
        "protocol 0": (b"cos\nsystem\n(S'" + shell.encode() + b"'\ntR.", "os.system"),
        "inst": (b"(S'" + shell.encode() + b"'\nios\nsystem\n.", "os.system"),
        "obj": (
            b"\x80\x02(csubprocess\ngetoutput\n" + short(shell) + b"o.",
            "subprocess.getoutput",
        ),
        "stack global": (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93" + touch, "os.system"),
        "newobj": (
            b"\x80\x02csubprocess\nPopen\n(]"
            + short("touch")
            + b"a"
            + short(str(marker))
            + b"at\x81.",
            "subprocess.Popen",
        ),
        "newobj_ex": (
            b"\x80\x04csubprocess\nPopen\n("
            + short(shell)
            + b"t}"
            + short("shell")
            + b"\x88s\x92.",
            "subprocess.Popen",
        ),
        "getattr chain": (
            b"\x80\x02cbuiltins\ngetattr\ncbuiltins\n__import__\n"
            + short("os")
            + b"\x85R"
            + short("system")
            + b"\x86R"
            + touch,
            "builtins.getattr",
        ),
        "setstate": (
            b"\x80\x02cargparse\nNamespace\n)\x81}"
            + short("__setstate__")
            + b"cos\nsystem\nsb"
            + short(shell)
            + b"b.",
            "os.system",
        ),
        "dotted name": (
            b"\x80\x04" + short("collections") + short("OrderedDict.__init__") + b"\x93.",
            "collections.OrderedDict.__init__",
        ),
        "dotted globals": (
            b"\x80\x04"
            + short("torch._utils")
            + short("_rebuild_tensor_v2.__globals__")
            + b"\x93.",
            "torch._utils._rebuild_tensor_v2.__globals__",
        ),
        "nested torch.load": (
            b"\x80\x02ctorch.storage\n_load_from_bytes\n" + short("x") + b"\x85R.",
            "torch.storage._load_from_bytes",
        ),
        "called and dropped": (b"\x80\x02cos\nsystem\n" + short(shell) + b"\x85R0}.", "os.system"),
        "then broken": (b"\x80\x02cos\nsystem\n" + short(shell) + b"\x85Rt.", "os.system"),
        "never called": (b"\x80\x02cos\nsystem\n.", "os.system"),
        "unknown function": (
            b"\x80\x02cmy_project.tools\nrun_all\n" + short("x") + b"\x85R.",
            "my_project.tools.run_all",
        ),
        "unknown function, inst": (
            b"(S'x'\nimy_project.tools\nrun_all\n.",
            "my_project.tools.run_all",
        ),
        "unknown function, obj": (
            b"\x80\x02(cmy_project.tools\nrun_all\n" + short("x") + b"o.",
            "my_project.tools.run_all",
        ),
        "imported elsewhere": (
            b"\x80\x02cmy_project.tools\nPopen\n" + short(shell) + b"\x85R.",
            "my_project.tools.Popen",
        ),
        "module inside a module": (
            b"\x80\x04" + short("torch.serialization") + short("os.system") + b"\x93" + touch,
            "torch.serialization.os.system",
        ),
        "compiled source": (
            b"\x80\x02ctorch.jit\nCompilationUnit\n" + short("x") + b"\x85R.",
            "torch.jit.CompilationUnit",
        ),
        "an archive of code": (
            b"\x80\x02ctorch.package.package_importer\nPackageImporter\n" + short("x") + b"\x85R.",
            "torch.package.package_importer.PackageImporter",
        ),
        "a part that compiles": (
            b"\x80\x02ctorch._C\nScriptModule\n" + short("x") + b"\x85R.",
            "torch._C.ScriptModule",
        ),
        "another library's code": (
            b"\x80\x02ctensorflow.python.keras.layers\nLambda\n" + short("x") + b"\x85R.",
            "tensorflow.python.keras.layers.Lambda",
        ),
        "a class of the library": (
            b"\x80\x02clogging\nFileHandler\n" + short(str(marker)) + b"\x85R.",
            "logging.FileHandler",
        ),
        "a class of the library, newobj": (b"\x80\x02ctypes\nCodeType\n)\x81.", "types.CodeType"),
        "a class of the library, reconstructed": (
            b"\x80\x02ccopy_reg\n_reconstructor\n(ctypes\nFunctionType\nc__builtin__\nobject\nNtR.",
            "types.FunctionType",
        ),
        "a function of functions": (
            b"\x80\x02cfunctools\nreduce\n" + short("x") + b"\x85R.",
            "functools.reduce",
        ),
        "a rebuilding function": (
            b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cmy_project.tools\nrun_all\n"
            b"ctorch\nTensor\n" + short("x") + b"\x85}tR.",
            "my_project.tools.run_all",
        ),
        "a call of an object": (
            b"\x80\x02cfunctools\npartial\ncmy_project.tools\nrun_all\n\x85R" + touch,
            "an object of its own making",
        ),
        "a state twice": (
            b"\x80\x02cargparse\nNamespace\n)\x81}"
            + short("__setstate__")
            + b"cmy_project.tools\nrun_all\nsb"
            + short(shell)
            + b"b.",
            "what it put into an object itself",
        ),
        "items after the state": (
            b"\x80\x02cmy_project.tools\nBox\n)\x81}"
            + short("extend")
            + b"cmy_project.tools\nrun_all\nsb("
            + short(shell)
            + b"e.",
            "what it put into an object itself",
        ),
        "a table's state twice": (
            b"\x80\x02ccollections\nOrderedDict\n)R}"
            + short("__setstate__")
            + b"cmy_project.tools\nrun_all\nsb"
            + short(shell)
            + b"b.",
            "what it put into an object itself",
        ),
        "a class with other attributes": (
            b"\x80\x02cargparse\nNamespace\nN}"
            + short("__init__")
            + b"cmy_project.tools\nrun_all\ns\x86b.",
            "argparse.Namespace, with other attributes,",
        ),
    }


NAMES = list(attacks(Path("x")))
RUNNABLE = {
    *("os.system", "posix.system", "eval", "exec", "protocol 0", "inst", "obj", "stack global"),
    *("getattr chain", "setstate", "called and dropped"),
}


def with_an_entry(path: Path, program: bytes, key: str = "hyper_parameters") -> Path:
    """A torch file with a state dict, and in the entry `key` what the program makes."""
    torch.save({"state_dict": STATE}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    body = program[2:-1] if program[:1] == b"\x80" else program[:-1]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            if name.endswith("/data.pkl"):
                archive.writestr(name, data[:-1] + short(key) + body + b"s.")
            else:
                archive.writestr(name, data)
    return path


class Evil:
    """Embeds a pickle program's call in an otherwise ordinary object."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ran"
    yield path
    assert not path.exists(), "code of the file was run"


def refusal(path: Path) -> UnreadableInput:
    modules = set(sys.modules)
    with pytest.raises(UnreadableInput) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code is ExitCode.UNREADABLE
    assert not {m for m in sys.modules if m not in modules and not m.startswith("encodings")}
    return caught.value


def as_zip(path: Path, program: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
    return path


def as_legacy(path: Path, program: bytes) -> Path:
    head = b"".join(pickle.dumps(v, 2) for v in (MAGIC, 1001, {"little_endian": True}))
    path.write_bytes(head + program + pickle.dumps([], 2))
    return path


def as_plain(path: Path, program: bytes) -> Path:
    path.write_bytes(program)
    return path


@pytest.mark.parametrize("wrap", [as_zip, as_legacy, as_plain])
@pytest.mark.parametrize("name", NAMES)
def test_attack_is_refused_and_nothing_runs(
    tmp_path: Path, marker: Path, name: str, wrap: Callable[[Path, bytes], Path]
) -> None:
    program, named = attacks(marker)[name]
    error = refusal(wrap(tmp_path / "x.pt", program))
    assert error.what == "a pickle that could run code"
    assert f"import or call {named}" in str(error.why)
    assert "nothing was run" in str(error.why)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"then broken"}))
def test_attack_in_an_entry_is_refused(tmp_path: Path, marker: Path, name: str) -> None:
    program, named = attacks(marker)[name]
    error = refusal(with_an_entry(tmp_path / "x.pt", program))
    assert error.what == "a pickle that could run code"
    assert f"import or call {named}" in str(error.why)


@pytest.mark.parametrize("name", sorted(RUNNABLE))
def test_the_attacks_are_real(tmp_path: Path, name: str) -> None:
    ran = tmp_path / "control"
    pickle.loads(attacks(ran)[name][0])
    assert ran.exists()


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        lambda evil: {"w": STATE["w"], "x": evil},
        lambda evil: {"state_dict": STATE, "args": evil},
        lambda evil: {"model": STATE, "rest": [({"a": evil},)]},
        lambda evil: evil,
    ],
)
def test_attack_beside_the_weights(
    tmp_path: Path, marker: Path, new: bool, place: Callable[[Any], Any]
) -> None:
    torch.save(place(Evil(marker)), tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    error = refusal(tmp_path / "x.pt")
    assert "posix.system" in str(error.why)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"model": m, "epoch": 3}])
def test_whole_module(tmp_path: Path, new: bool, wrap: Callable[[Any], Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save(wrap(module), tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    error = refusal(tmp_path / "x.pt")
    assert error.what == "a whole module, not a state dict"
    assert "torch.nn.modules" in str(error.why)
    assert "torch.save(model.state_dict()" in str(error.fix)


def test_whole_module_with_an_attack_inside(tmp_path: Path, marker: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module.extra = Evil(marker)
    torch.save(module, tmp_path / "x.pt")
    assert "posix.system" in str(refusal(tmp_path / "x.pt").why)


COMPANY = {
    "namespace": argparse.Namespace(lr=0.1, layers=[1, 2]),
    "scalar": np.float64(3.5),
    "array": np.arange(4),
    "dtype": np.dtype("float32"),
    "path": pathlib.Path("x/y"),
    "pure": pathlib.PureWindowsPath("x"),
    "when": datetime.datetime(2024, 1, 2),
    "span": datetime.timedelta(3),
    "default": collections.defaultdict(list, {"a": [1]}),
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "set": {1, 2},
    "frozen": frozenset([3]),
    "bytes": b"abc",
    "complex": 1 + 2j,
    "size": torch.Size([2, 3]),
    "device": torch.device("cuda:0"),
    "dtype_": torch.bfloat16,
    "big": 1 << 100,
    "none": None,
    "range": range(3),
    "buffer": io.BytesIO(b"x"),
    "tuple key": {(1, 2): "x", frozenset([1]): "y", 3.5: "z"},
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_harmless_company_is_skipped(
    tmp_path: Path, protocol: int, new: bool, inside: bool
) -> None:
    value = {**STATE, **COMPANY} if inside else {"state_dict": STATE, **COMPANY}
    options = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": new}
    torch.save(value, tmp_path / "x.pt", **options)
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert list(checkpoint.infos) == ["w"]
        assert torch.equal(checkpoint.read("w"), STATE["w"])


class Phase(enum.Enum):
    TRAIN = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    depth: int = 3


class Pair(NamedTuple):
    one: int
    two: int


class lower:  # noqa: N801 - as people write them
    def __init__(self) -> None:
        self.x = [1, {"a": None}]


def user_loss(x: Any) -> Any:
    return x


LAYER = torch.nn.Linear(2, 2)

OBJECTS: dict[str, Any] = {
    "loss": torch.nn.MSELoss(),
    "weighted loss": torch.nn.CrossEntropyLoss(weight=torch.rand(3)),
    "activation class": torch.nn.GELU,
    "partial of a class": functools.partial(torch.nn.GELU, approximate="tanh"),
    "partial optimizer": functools.partial(torch.optim.AdamW, lr=0.1),
    "function": torch.nn.functional.cross_entropy,
    "built-in function": torch.nn.functional.gelu,
    "user's function": user_loss,
    "a whole network": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()),
    "namespace of objects": argparse.Namespace(loss=torch.nn.MSELoss(), act=torch.nn.ReLU),
    "optimizer": torch.optim.SGD(LAYER.parameters(), lr=0.1, momentum=0.9),
    "schedule": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(LAYER.parameters(), lr=0.1), 1),
    "enum": Phase.TRAIN,
    "dataclass": Settings(),
    "named tuple": Pair(1, 2),
    "class of a lower-case name": lower(),
    "class": Settings,
    "simple namespace": types.SimpleNamespace(a=1),
    "logger": logging.getLogger("x"),
    "pattern": re.compile("a+", re.IGNORECASE),
    "random": random.Random(0),
    "numpy generator": np.random.default_rng(0),
    "numpy random state": np.random.RandomState(0),
    "numpy flag": np.bool_(True),
    "numpy type": np.float32,
    "torch generator": torch.Generator(),
    "decimal": decimal.Decimal("1.5"),
    "uuid": uuid.UUID(int=3),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_beside_the_weights_are_skipped(tmp_path: Path, name: str, new: bool) -> None:
    value = {"state_dict": STATE, "hyper_parameters": {"it": OBJECTS[name]}, "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the schedule, which wants its optimizer to step
        torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert list(checkpoint.infos) == ["w"]
        assert torch.equal(checkpoint.read("w"), STATE["w"])
        extras = checkpoint.extras()
        assert ["hyper_parameters" in text for text in extras.left_out] == [True]
        assert extras.levels[0][1]["epoch"] == 3


PROJECTS = [
    ("omegaconf.dictconfig", "DictConfig"),
    ("omegaconf.base", "SCMode"),
    ("transformers.training_args", "TrainingArguments"),
    ("pytorch_lightning.callbacks.lr_monitor", "LearningRateMonitor"),
    ("fairseq.dataclass.configs", "FairseqConfig"),
    ("mmengine.config.lazy", "LazyObject"),
    ("wandb.sdk.wandb_config", "Config"),
    ("my_project.models.deep.inside", "Options"),
    ("__main__", "Config"),
    ("_private_project", "_Options"),
]


@pytest.mark.parametrize(("module", "name"), PROJECTS)
def test_objects_of_projects_that_are_not_installed(
    tmp_path: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances with a state, enums and classes, of modules that nobody here can import."""
    kind = type(name, (), {"__module__": module})
    mode = enum.Enum("Mode", "NO YES", module=module)
    place = types.ModuleType(module)
    setattr(place, name, kind)
    place.Mode = mode  # type: ignore[attr-defined]
    value = kind()
    value.__dict__ |= {"steps": 3, "mode": mode.YES, "inner": {"again": kind()}}
    parts = module.split(".")
    with monkeypatch.context() as patch:
        for at in range(1, len(parts)):
            parent = ".".join(parts[:at])
            patch.setitem(sys.modules, parent, types.ModuleType(parent))
        patch.setitem(sys.modules, module, place)
        torch.save({"model": STATE, "args": value, "cls": kind}, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert list(checkpoint.infos) == ["w"]
        left_out = checkpoint.extras().left_out
    assert left_out == (f"args (a {module}.{name})", f"cls (names {module}.{name})")


def test_an_object_of_a_project_alone(tmp_path: Path) -> None:
    program = b"\x80\x02cmy_project.config\nConfig\n)\x81."
    error = refusal(as_zip(tmp_path / "x.pt", program))
    assert error.what == "no tensors found"
    assert "an object of class my_project.config.Config" in str(error.why)


NET = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        NET,
        {"model": NET, "epoch": 3},
        {"model": NET, "optimizer": {"state": {0: {"exp_avg": torch.rand(2)}}, "param_groups": []}},
        {"net": NET, "best": {"score": 1.0}},
        {"nets": [NET]},
        {"run": {"net": NET}},
        {"layer1": torch.nn.Linear(2, 2), "layer2": torch.nn.Linear(2, 2)},
        {"w": torch.rand(2, 2), "layer": torch.nn.Linear(2, 2)},
        {"state_dict": {"w": torch.rand(2, 2), "head": torch.nn.Linear(2, 2)}},
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else type(value).__name__,
)
def test_weights_that_are_a_module(tmp_path: Path, value: Any, new: bool) -> None:
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    error = refusal(tmp_path / "x.pt")
    assert error.what == "a whole module, not a state dict"
    assert "torch.nn.modules" in str(error.why)
    with pytest.raises(UnreadableInput, match=r"a whole module|no tensors"):
        open_checkpoint(value if isinstance(value, dict) else {"model": value})


@pytest.mark.parametrize("name", ["model", "net", "ema"])
def test_a_module_beside_a_state_dict_is_a_choice(tmp_path: Path, name: str) -> None:
    torch.save({"state_dict": NET.state_dict(), name: NET}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="several state dicts") as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert f"{name} (a whole module)" in str(caught.value.why)
    assert "--key state_dict" in str(caught.value.fix)
    with open_checkpoint(tmp_path / "x.pt", key="state_dict") as checkpoint:
        assert len(checkpoint.infos) == len(NET.state_dict())


def test_parameters_and_tensors_with_attributes(tmp_path: Path) -> None:
    marked = torch.nn.Parameter(torch.rand(3))
    marked.note = "kept out of the optimizer"
    plain = torch.rand(2)
    plain.note = "x"
    torch.save({"marked": marked, "plain": plain}, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert torch.equal(checkpoint.read("marked"), marked.detach())
        assert torch.equal(checkpoint.read("plain"), plain)


class Subclass(torch.Tensor):
    pass


def test_tensor_subclass_is_refused(tmp_path: Path) -> None:
    tensor = torch.rand(2).as_subclass(Subclass)
    torch.save({"w": tensor}, tmp_path / "x.pt")
    assert "Subclass" in str(refusal(tmp_path / "x.pt").why)
    with pytest.raises(UnreadableInput, match="Subclass"):
        open_checkpoint({"w": tensor})


def load(program: bytes) -> Any:
    return Unpickler(lambda pid: pid).load(io.BytesIO(program))


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_read_as_pickle_reads_it(protocol: int) -> None:
    value = [{"a": (1, -2, 1 << 70), "b": [None, True, False, 1.5, "é\n'", b"x"]}, (), [], ((1,),)]
    text = [v if v != b"x" else "x" for v in value[0]["b"]] if protocol < 3 else value[0]["b"]
    value[0]["b"] = text
    assert load(pickle.dumps(value, protocol)) == value


def test_odd_escapes_are_read_without_a_warning() -> None:
    assert load(b"S'a\\m'\n.") == "a\\m"


def test_memo_and_cycles() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for protocol in (0, 2, 4):
        again = load(pickle.dumps([loop, loop], protocol))
        assert again[0] is again[1]
        assert again[0][0] is again[0]


def test_calls_leave_records() -> None:
    value = load(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    assert isinstance(value, Foreign)
    assert (value.symbol, value.args) == (Symbol("os", "system"), ("ls",))
    again = load(b"\x80\x02cos\nsystem\n)R)R.")
    assert isinstance(again, Foreign)
    assert again.symbol is None
    assert load(b"\x80\x02ccollections\nOrderedDict\n)R.") == {}
    assert type(load(b"\x80\x02}.")) is Table


def tensor_program(*args: object, after: bytes = b"") -> bytes:
    """A call of torch's rebuild function; the storage stands as a persistent id."""
    arguments = b"".join(pickle.dumps(value, 2)[2:-1] for value in args)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NQ" + arguments + b"tR" + after + b"."


STORAGE = StorageRef("0", torch.float32, 6)


def load_tensor(program: bytes) -> Any:
    return Unpickler(lambda pid: STORAGE).load(io.BytesIO(program))


def test_a_tensor_is_only_described() -> None:
    tensor = load_tensor(tensor_program(1, (2, 1), (2, 1), False, None))
    assert isinstance(tensor, TensorRef)
    assert (tensor.storage, tensor.offset, tensor.shape, tensor.stride) == (
        *(STORAGE, 1),
        *((2, 1), (2, 1)),
    )


def test_a_tensor_with_a_state_is_not_supported() -> None:
    value = load_tensor(tensor_program(0, (2,), (1,), False, None, after=b"}b"))
    assert isinstance(value, Unsupported)


@pytest.mark.parametrize(
    "args",
    [
        (True, (2,), (1,)),
        (0.0, (2,), (1,)),
        (-1, (2,), (1,)),
        (0, (2.0,), (1,)),
        (0, (2,), (-1,)),
        (0, (2,), (1, 1)),
        (0, 2, (1,)),
        (0, (0, 2**62, 4), (1, 1, 1)),
        (0, (1,) * 65, (1,) * 65),
        (1 << 63, (2,), (1,)),
    ],
)
def test_impossible_tensors(args: tuple[object, ...]) -> None:
    with pytest.raises(BrokenPickleError):
        load_tensor(tensor_program(*args, False, None))


def test_only_plain_tensor_classes_are_rebuilt() -> None:
    function = Symbol("torch._utils", "_rebuild_tensor_v2")
    args = (STORAGE, 0, (6,), (1,), False, None)
    typed = Symbol("torch._tensor", "_rebuild_from_type_v2")
    for cls, kind in [
        (Symbol("torch", "Tensor"), TensorRef),
        (Symbol("torch.nn.parameter", "Parameter"), TensorRef),
        (Symbol("collections", "OrderedDict"), Unsupported),
    ]:
        assert type(rebuild(typed, (function, cls, args, {}))) is kind
    with pytest.raises(ValueError, match="its own rebuilding"):
        rebuild(typed, (typed, Symbol("torch", "Tensor"), args, {}))


@pytest.mark.parametrize(
    "pid",
    [
        None,
        (),
        ("other", 1),
        ("storage", Symbol("torch", "FloatStorage"), "0", "cpu"),
        ("storage", Symbol("os", "system"), "0", "cpu", 3),
        ("storage", Symbol("torch", "FloatStorage"), 0, "cpu", 3),
        ("storage", Symbol("torch", "FloatStorage"), "0", "cpu", -3),
        ("storage", Symbol("torch", "FloatStorage"), "0", "cpu", 3, ("1", 2, 2)),
    ],
)
def test_impossible_storages(pid: object) -> None:
    with pytest.raises(ValueError, match=r"persistent id|storage|size"):
        storage_from_id(pid)


def test_a_legacy_view_of_a_storage() -> None:
    kind = Symbol("torch", "FloatStorage")
    got = storage_from_id(("storage", kind, "0", "cpu", 6, ("1", 2, 3)))
    assert got == StorageRef("0", torch.float32, 6, first=2)


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02K\x01",
        b"\x80\x02K\x01)R.",  # calls a number
        b"\x80\x02K\x01}b.",  # sets a state on a number
        b"\x80\x02]}b.",  # ... on a list
        b"\x80\x02K\x01K\x02a.",  # appends to a number
        b"\x80\x02K\x01K\x02K\x02s.",  # sets an item of a number
        b"\x80\x02(K\x01",
        b"\x80\x02h\x05.",  # a memo that was never put
        b"\x80\x02\x82\x01.",  # extension registry
        b"\x80\x05\x97.",  # out-of-band buffer
        b"Px\n.",  # persistent id of protocol 0
        b"\x80\x02cos\nsystem\nK\x01R.",  # arguments that are no tuple
        b"\x80\x04K\x01K\x02\x93.",  # a global whose name is a number
        b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",  # a string beyond any file
        b"\x80\x02}(K\x01u.",  # half an item
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00))\x89Nt" + b"R.",
    ],
)
def test_broken_programs(program: bytes) -> None:
    with pytest.raises(BrokenPickleError):
        load(program)


def test_hashing_bomb_is_not_hashed() -> None:
    # 60 levels of pairs: 2**60 leaves for a hash, 60 objects in memory.
    bomb = b"\x80\x02}K\x01\x85" + b"".join(b"2\x86" for _ in range(60)) + b"K\x01s."
    assert len(load(bomb)) == 1


def test_symbols_are_shown_on_one_line() -> None:
    assert str(Symbol("os\n\x1b[2J", "x" * 500)).startswith("os??[2J.xxx")
    assert len(str(Symbol("a", "x" * 500))) < 250
