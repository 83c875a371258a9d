"""The names a pickle refers to, and which of them are harmless.

Nothing here is ever imported or called on behalf of a file: a global becomes a `Symbol`, a call of
one becomes a `Foreign`. The lists only decide whether a file is read, skipping what is foreign, or
refused because an ordinary loader would run its code. An object of a class, of whichever project,
is data: its record is skipped. A call of a function, or of anything in the standard library that is
not listed, may do anything: refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ..names import shown


@dataclass(frozen=True, slots=True)
class Symbol:
    """A global named by a pickle: module and qualified name, just text."""

    module: str
    name: str

    def __str__(self) -> str:
        return shown(f"{self.module}.{self.name}")


class Foreign:
    """What a pickle would make by calling a symbol; inert, compared by identity."""

    __slots__ = ("args", "state", "symbol")

    def __init__(self, symbol: Symbol | None, args: Any = ()) -> None:
        self.symbol = symbol
        self.args = args
        self.state: Any = None

    @property
    def is_module(self) -> bool:
        """Whether its state is that of a `torch.nn.Module`."""
        state = self.state
        return isinstance(state, dict) and "_modules" in state and "_parameters" in state

    @property
    def cls(self) -> Symbol | None:
        """The class it is an instance of, as far as its reconstruction tells."""
        if self.symbol in _RECONSTRUCTORS and self.args and isinstance(self.args[0], Symbol):
            return self.args[0]
        return self.symbol


def is_harmless(symbol: Symbol) -> bool:
    """Whether the symbol is on the list of those that tensors, plain data and configs need."""
    return symbol.name in _HARMLESS.get(symbol.module, ())


def is_hostile(symbol: Symbol) -> bool:
    """Whether the symbol is one that only code execution has a use for, called or not."""
    if is_harmless(symbol):
        return False
    if symbol.module in ("builtins", "__builtin__"):
        return True
    if symbol.module.split(".", 1)[0] in _HOSTILE:
        return True
    # A class inside a class is data; `torch.serialization` `os.system` is a way round this list,
    # and so is whatever lies behind a name in double underscores.
    outer, *inner = symbol.name.split(".")
    return (bool(inner) and not _names_a_class(outer)) or any(map(_is_special, (outer, *inner)))


def runs_when_made(symbol: Symbol) -> bool:
    """Whether making an object of this class, without calling it, may run more than that."""
    if is_harmless(symbol):
        return False
    return is_hostile(symbol) or symbol.module.split(".", 1)[0] in sys.stdlib_module_names


def runs_when_called(symbol: Symbol) -> bool:
    """Whether a call may run more than a constructor: of a function, not of a class.

    Nobody can tell them apart without importing them but by how they are spelled.
    """
    if is_harmless(symbol):
        return False
    name = symbol.name.rpartition(".")[2]
    if not _names_a_class(name) or name in _EXECUTING_CLASSES:
        return True
    inside = any(f"{symbol.module}.".startswith(f"{part}.") for part in _EXECUTING)
    return inside or runs_when_made(symbol)


def made_by(symbol: Symbol, args: Any) -> tuple[Symbol, ...]:
    """The classes whose objects a call of `copyreg`'s functions makes."""
    if symbol not in _RECONSTRUCTORS or not isinstance(args, tuple):
        return ()
    return tuple(arg for arg in args[:2] if isinstance(arg, Symbol))


def _names_a_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def storage_dtype(symbol: object) -> torch.dtype | None:
    """Dtype of a torch storage class; bytes for an untyped storage."""
    if not isinstance(symbol, Symbol):
        return None
    if symbol.module in ("torch", "torch.cuda"):
        return _STORAGES.get(symbol.name)
    if symbol == Symbol("torch.storage", "UntypedStorage"):
        return torch.uint8
    return None


def dtype_of(symbol: object) -> torch.dtype | None:
    """The torch dtype a symbol such as `torch.float8_e4m3fn` names."""
    if isinstance(symbol, Symbol) and symbol.module == "torch":
        return _DTYPES.get(symbol.name)
    return None


def words(text: str) -> frozenset[str]:
    """The set of words in a text."""
    return frozenset(text.split())


_RECONSTRUCTORS = tuple(
    Symbol(module, name)
    for module in ("copyreg", "copy_reg")
    for name in ("_reconstructor", "__newobj__", "__newobj_ex__")
)

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    # Only quantised tensors use these, and those are refused by name later.
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
    "QUInt4x2Storage": torch.uint8,
    "QUInt2x4Storage": torch.uint8,
}

_DTYPE_NAMES = words(
    """
float32 float64 float16 bfloat16 float double half int8 int16 int32 int64 short int long uint8
uint16 uint32 uint64 bool complex64 complex128 cfloat cdouble float8_e4m3fn float8_e5m2
float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
)
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in sorted(_DTYPE_NAMES) if hasattr(torch, name)
}

_PLAIN_TYPES = """
set frozenset dict list tuple bytearray bytes complex range slice object int float str bool unicode
long basestring xrange type Ellipsis NotImplemented
"""
_NUMPY_ARRAYS = "scalar _reconstruct"
_ATTRIBUTE_DICT = "AttributeDict"
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"

_HARMLESS: dict[str, frozenset[str]] = {
    module: words(names)
    for module, names in {
        "builtins": _PLAIN_TYPES,
        "__builtin__": _PLAIN_TYPES,
        "_codecs": "encode",  # how protocol 2 spells bytes
        "copyreg": "_reconstructor __newobj__ __newobj_ex__",
        "copy_reg": "_reconstructor __newobj__ __newobj_ex__",
        "collections": "OrderedDict defaultdict Counter deque UserDict ChainMap",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "functools": "partial",
        "logging": "Logger RootLogger getLogger",
        "re": "_compile RegexFlag",
        "random": "Random",
        "itertools": "count repeat chain cycle",
        "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
        "enum": "Enum IntEnum StrEnum Flag IntFlag",
        "typing": "Any",
        "_io": "BytesIO",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "uuid": "UUID SafeUUID",
        "pathlib": _PATHS,
        "pathlib._local": _PATHS,
        "numpy": """ndarray dtype float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32
            uint64 bool_ bool str_ bytes_ longlong ulonglong complex64 complex128""",
        "numpy.core.multiarray": _NUMPY_ARRAYS,
        "numpy._core.multiarray": _NUMPY_ARRAYS,
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
        "numpy.random.bit_generator": "__pyx_unpickle_SeedSequence SeedSequence",
        "torch._C": "Generator",
        "pandas._libs.tslibs.timestamps": "_unpickle_timestamp",
        "pandas._libs.internals": "_unpickle_block",
        "pandas.core.indexes.base": "_new_Index",
        "numpy.dtypes": """Float16DType Float32DType Float64DType Int8DType Int16DType Int32DType
            Int64DType UInt8DType UInt16DType UInt32DType UInt64DType BoolDType StrDType BytesDType
            ObjectDType DateTime64DType TimeDelta64DType""",
        "torch": f"""{" ".join([*_STORAGES, *_DTYPES])} Size device Tensor strided sparse_coo
            sparse_csr contiguous_format preserve_format channels_last per_tensor_affine
            per_channel_affine per_tensor_symmetric per_channel_symmetric qint8 quint8 qint32
            quint4x2 quint2x4 complex32 bits8 bits16 bits1x8 bits2x4 bits4x2 float4_e2m1fn_x2""",
        "torch.cuda": " ".join(_STORAGES),
        "torch.storage": "UntypedStorage TypedStorage",
        "torch.serialization": "_get_layout",
        "torch.nn.parameter": "Parameter Buffer",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch._utils": """_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter
            _rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor
            _rebuild_sparse_csr_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage
            _rebuild_wrapper_subclass _rebuild_xla_tensor _rebuild_device_tensor_from_numpy
            _rebuild_device_tensor_from_cpu_tensor""",
        "torch.torch_version": "TorchVersion",
        "torch.distributed.checkpoint.metadata": """Metadata TensorStorageMetadata TensorProperties
            ChunkStorageMetadata BytesStorageMetadata MetadataIndex StorageMeta
            _MEM_FORMAT_ENCODING""",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        "pytorch_lightning.utilities.parsing": _ATTRIBUTE_DICT,
        "lightning.pytorch.utilities.parsing": _ATTRIBUTE_DICT,
        "lightning_fabric.utilities.data": _ATTRIBUTE_DICT,
        "lightning.fabric.utilities.data": _ATTRIBUTE_DICT,
        "pytorch_lightning.callbacks.model_checkpoint": "ModelCheckpoint",
        "pytorch_lightning.callbacks.early_stopping": "EarlyStopping",
        "omegaconf.dictconfig": "DictConfig",
        "omegaconf.listconfig": "ListConfig",
        "omegaconf.base": "ContainerMetadata Metadata",
        "omegaconf.nodes": """AnyNode StringNode IntegerNode FloatNode BooleanNode
            BytesNode PathNode EnumNode""",
        "yacs.config": "CfgNode",
        "fvcore.common.config": "CfgNode",
        "detectron2.config.config": "CfgNode",
        "easydict": "EasyDict",
        "addict.addict": "Dict",
        "box.box": "Box",
        "box.box_list": "BoxList",
        "mmengine.config.config": "ConfigDict",
        "mmcv.utils.config": "ConfigDict",
        "ml_collections.config_dict.config_dict": "ConfigDict FrozenConfigDict",
    }.items()
}

# Parts of libraries that compile or load code, or talk to other machines, when asked nicely.
_EXECUTING = (
    *("torch.jit", "torch.package", "torch.hub", "torch.utils.cpp_extension", "torch._C"),
    *("torch.ops", "torch.classes", "torch._dynamo", "torch._inductor", "torch.fx"),
    *("torch.distributed.rpc", "torch.distributed.elastic", "torch.distributed.launcher"),
    *("torch.multiprocessing", "torch.utils.model_zoo", "torch.export", "torch.testing"),
    *("numpy.f2py", "numpy.distutils", "numpy.ctypeslib", "numpy.lib.npyio", "numpy.testing"),
    *("tensorflow", "keras", "IPython", "paramiko", "fabric", "invoke", "pexpect", "plumbum", "sh"),
    *("psutil", "ray", "dask", "docker", "jinja2", "mako", "numba", "cffi", "pybind11", "git"),
)
# Classes that do something when they are made, wherever they are imported from.
_EXECUTING_CLASSES = words(
    """
Popen Process Pool Thread Timer ThreadPool ProcessPoolExecutor ThreadPoolExecutor FunctionType
CodeType LambdaType MethodType ModuleType InteractiveConsole InteractiveInterpreter Repo CDLL PyDLL
TCPStore FileStore HashStore PrefixStore CompilationUnit PackageImporter DataLoader
"""
)

_HOSTILE = words(
    """
os posix nt posixpath ntpath subprocess sys shutil socket ssl importlib imp runpy pty commands
ctypes _ctypes code codeop codecs marshal pickle _pickle cPickle dill cloudpickle joblib pickletools
operator _operator timeit bdb pdb cProfile profile trace webbrowser platform
urllib urllib2 requests http ftplib smtplib tempfile glob fileinput io linecache inspect ast
signal _thread thread multiprocessing atexit site pip
setuptools distutils venv zipimport pkgutil pydoc doctest turtle idlelib
"""
)
