"""Files and folders that hold no checkpoint we read: how each is told, what it is, what to do.

One row for each container, with every way it shows: first bytes, records of a zip archive, classes
of a pickle, files of a folder, or a test where nothing simpler tells it. A file that a format
claims never comes here, but for the placeholders; within each way the first row that fits counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...errors import UnreadableInput
from ...output_names import SUFFIXES
from ..disk import Disk
from ..names import shown
from ..wrappers import SAVE_STATE_DICT
from .folder_files import FolderFiles
from .protobuf import is_coreml, is_onnx, is_tensorflow_graph
from .symbols import Symbol

Names = tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """A container that is not read.

    Attributes:
        kind: What it is, after "it is" or "it holds".
        fix: What its owner can do.
        what: The failure in one line.
        why: The cause, where `kind` alone is none.
        magic: Bytes and where they lie among the first 512; any of them tells it.
        text: The same for text: a pattern of what it begins with, after white space, in any case.
        members: Names of zip records, as patterns below the archive's top folder; all of one tuple.
        pickled: Modules or globals that a pickle names; any of them, or one inside it.
        files: Names of files in a folder, as patterns; all of one tuple.
        looks: A test for files that no magic bytes tell.
    """

    kind: str
    fix: str
    what: str = "not a checkpoint"
    why: str | None = None
    magic: tuple[tuple[int, bytes], ...] = ()
    text: bytes | None = None
    members: tuple[Names, ...] = ()
    pickled: Names = ()
    files: tuple[Names, ...] = ()
    looks: Callable[[Disk, bytes], bool] | None = None

    def at(self, where: str, *, verb: str = "is") -> UnreadableInput:
        """The error."""
        why = self.why or f"it {verb} {self.kind}"
        return UnreadableInput(self.what, where=where, why=why, fix=self.fix)


def refuse_placeholder(disk: Disk, head: bytes) -> None:
    """Refuse what stands where a file should be: nothing, or a pointer to it.

    Raises:
        UnreadableInput: It is one.
    """
    if not head:
        raise _EMPTY.at(disk.label)
    if _has_magic(_LFS_POINTER, head):
        raise _LFS_POINTER.at(disk.label)


def refuse_magic(disk: Disk, head: bytes) -> None:
    """Refuse a file that its first bytes tell.

    Raises:
        UnreadableInput: They do.
    """
    text = head.lstrip(_SPACE)
    for row in REFUSALS:
        if _has_magic(row, head) or _has_text(row, text):
            raise row.at(disk.label)


def refuse_structure(disk: Disk, head: bytes) -> None:
    """Refuse a file without magic bytes that its structure tells.

    Raises:
        UnreadableInput: It does.
    """
    for row in REFUSALS:
        if row.looks is not None and row.looks(disk, head):
            raise row.at(disk.label)


def unknown_file(disk: Disk) -> UnreadableInput:
    """The refusal of bytes that nothing tells."""
    why = "its bytes are in no known format"
    if disk.path.suffix == ".safetensors":
        why = "it is no safetensors file, whatever its name says"
    fix = "give a .safetensors file or one written by torch.save"
    return UnreadableInput("not a checkpoint", where=disk.label, why=why, fix=fix)


def refuse_archive(disk: Disk, records: Collection[str]) -> None:
    """Refuse a zip archive whose records are those of another format.

    Raises:
        UnreadableInput: They are.
    """
    tops = {name.partition("/")[0] for name in records}
    names = set(records)
    if len(tops) == 1:
        names |= {name.partition("/")[2] for name in records}
    for row in REFUSALS:
        if _has_any(row.members, names):
            raise row.at(disk.label)
    if records and all(name.endswith(".npy") for name in records):
        raise _NUMPY.at(disk.label)


def refuse_pickle(disk: Disk, symbols: Iterable[Symbol], root: Any) -> None:
    """Refuse a pickle that another library wrote.

    Raises:
        UnreadableInput: One that is told by its classes, or by a key of its own.
    """
    if isinstance(root, dict) and _PADDLE_KEY in root:
        raise _PADDLE.at(disk.label)
    if (row := _pickled_by(symbols)) is not None:
        raise row.at(disk.label)


def foreign_dump(disk: Disk, unsafe: Collection[str]) -> UnreadableInput | None:
    """What to say of a pickle with these dangerous names, where they tell who wrote it.

    That is joblib's wrapper of arrays alone: where there is more, the danger is the news.
    """
    return _SKLEARN.at(disk.label) if set(unsafe) == {_JOBLIB_ARRAY} else None


def refuse_folder(files: FolderFiles) -> UnreadableInput:
    """The refusal of a folder in which there is nothing that is read."""
    names = {*files.names, *(f"{folder}/" for folder in files.folders)}
    for row in REFUSALS:
        if _has_any(row.files, names):
            return row.at(files.label, verb="holds")
    inside = [name for name in files.folders if not name.startswith(".")]
    fix = "name the folder or file that holds the weights"
    if inside:
        fix += f"; folders inside are {', '.join(shown(name, 80) for name in inside[:8])}"
    return UnreadableInput(
        "a folder without weights",
        where=files.label,
        why=f"it has no file that ends in {', '.join(SUFFIXES)}",
        fix=fix,
    )


def _has_magic(row: Refusal, head: bytes) -> bool:
    return any(head.startswith(magic, start) for start, magic in row.magic)


def _has_text(row: Refusal, text: bytes) -> bool:
    return row.text is not None and re.match(row.text, text, re.IGNORECASE) is not None


def _has_any(alternatives: tuple[Names, ...], names: Collection[str]) -> bool:
    """Whether the names match all patterns of one alternative."""
    return any(all(_matches(pattern, names) for pattern in every) for every in alternatives)


def _matches(pattern: str, names: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _pickled_by(symbols: Iterable[Symbol]) -> Refusal | None:
    names = [f"{symbol.module}.{symbol.name}." for symbol in symbols]
    for row in REFUSALS:
        starts = tuple(f"{name}." for name in row.pickled)
        if any(name.startswith(starts) for name in names):
            return row
    return None


def _is_tensorflow_index(disk: Disk, head: bytes) -> bool:
    """The index of a TensorFlow checkpoint is a table that ends in eight bytes of its own."""
    return disk.read_bytes(max(0, disk.size - 8), 8) == b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"


def _is_tensorflow_data(disk: Disk, head: bytes) -> bool:
    """Raw numbers: nothing but the name tells them."""
    return re.search(r"\.data-\d{5}-of-\d{5}$", disk.path.name) is not None


def _is_msgpack(disk: Disk, head: bytes) -> bool:
    """A map of MessagePack whose first key is a name, and whose first value a map or an array.

    The first byte is 0x80 and the number of entries, or 0xde or 0xdf and that number; the key is
    0xa0 and its length, or 0xd9 and that length, and text; flax marks an array as an extension.
    """
    if len(head) < 4 or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    kind = head[at : at + 1]
    if b"\xa1" <= kind <= b"\xbf":
        size = kind[0] - 0xA0
    elif kind == b"\xd9":
        at += 1
        size = int.from_bytes(head[at : at + 1], "little")
    else:
        return False
    key, value = head[at + 1 : at + 1 + size], head[at + 1 + size : at + 2 + size]
    is_map = b"\x80" <= value <= b"\x8f" or value in (b"\xde", b"\xdf")
    is_extension = value in (b"\xc7", b"\xc8", b"\xc9")
    return key.isascii() and key.decode("ascii").isprintable() and (is_map or is_extension)


_SPACE = b" \t\r\n\xef\xbb\xbf"  # the last three mark UTF-8
# paddle.save puts a table under this key beside the arrays of a state dict.
_PADDLE_KEY = "StructuredToParameterName@@"
_JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"

_UNPACK = "unpack it, and give the checkpoint inside"
_COPY_ARRAYS = (
    "build the same network in torch, copy the arrays into it (Keras, JAX and Paddle store the "
    f"kernels of linear layers transposed), and save that: {SAVE_STATE_DICT}"
)
_ORIGINAL = "give the torch checkpoint that it was made from"
_FROM_PROGRAM = "torch.save(torch.jit.load('model.pt').state_dict(), 'weights.pt')"

_EMPTY = Refusal(
    "an empty file",
    "copy or download the file again",
    what="an empty file",
    why="it has 0 bytes",
)
_LFS_POINTER = Refusal(
    "a Git LFS pointer",
    "run git lfs pull",
    what="a Git LFS pointer, not the weights",
    why="the repository was cloned without its large files",
    magic=((0, b"version https://git-lfs.github.com/spec"),),
)
_NUMPY = Refusal(
    "an archive of NumPy arrays (.npz)",
    "torch.save({name: torch.from_numpy(array) for name, array in numpy.load('weights.npz').items()"
    "}, 'weights.pt')",
)
_SKLEARN = Refusal(
    "a pickle or joblib dump of scikit-learn or its like; nothing was run",
    "give networks of torch: models of scikit-learn have no layers that could be matched",
    pickled=("sklearn", "joblib", "xgboost", "lightgbm", "catboost"),
)
_PADDLE = Refusal(
    "a state dict of PaddlePaddle (.pdparams)",
    _COPY_ARRAYS,
    pickled=("paddle",),
    files=(("*.pdparams",), ("*.pdiparams",)),
)

REFUSALS: tuple[Refusal, ...] = (
    _EMPTY,
    _LFS_POINTER,
    # Programs of torch.
    Refusal(
        "a program of PyTorch Mobile (.ptl)",
        f"{_ORIGINAL}, or, where it is a TorchScript archive as well: {_FROM_PROGRAM}",
        magic=((4, b"PTMF"),),
        members=(("bytecode.pkl", "constants.pkl"),),
    ),
    Refusal(
        "a TorchScript archive",
        _FROM_PROGRAM,
        what="a TorchScript archive, not a state dict",
        why="it holds a compiled program",
        members=(("data.pkl", "constants.pkl"),),
    ),
    Refusal(
        "a program of torch.export (.pt2)",
        "torch.save(torch.export.load('model.pt2').state_dict, 'weights.pt'); the program itself "
        "can be given to --arch",
        members=(("archive_format", "models/*"), ("serialized_exported_program.json",)),
    ),
    Refusal("a package of torch.package", _ORIGINAL, members=((".data/extern_modules",),)),
    Refusal(
        "an archive of TorchServe (.mar)",
        _UNPACK,
        members=(("MAR-INF/MANIFEST.json",),),
    ),
    Refusal("a program of ExecuTorch (.pte)", _ORIGINAL, magic=((4, b"ET12"),)),
    # Quantised formats of llama.cpp and its forerunners: GGML, GGMF, GGJT and GGLA, the magic
    # numbers of which stand in little-endian order.
    Refusal(
        "a GGUF file",
        f"{_ORIGINAL}: most GGUF files are quantised, and all name their tensors anew",
        magic=((0, b"GGUF"),),
        files=(("*.gguf",),),
    ),
    Refusal(
        "a GGML file",
        _ORIGINAL,
        magic=((0, b"lmgg"), (0, b"fmgg"), (0, b"tjgg"), (0, b"algg")),
        files=(("ggml-*.bin",),),
    ),
    # Other frameworks.
    Refusal(
        "a Keras archive (.keras)",
        f"{_COPY_ARRAYS}. keras.saving.load_model reads it",
        members=(("config.json", "model.weights.h5"), ("config.json", "metadata.json")),
        files=(("*.keras",),),
    ),
    Refusal(
        "an HDF5 file, as Keras writes it (.h5)",
        f"{_COPY_ARRAYS}. h5py.File or keras.saving.load_model reads it",
        magic=((0, b"\x89HDF"),),
        files=(("*.h5",), ("*.hdf5",)),
    ),
    Refusal(
        "a SavedModel or graph of TensorFlow (.pb)",
        f"{_COPY_ARRAYS}. tf.saved_model.load reads its folder",
        files=(("saved_model.pb",), ("saved_model.pbtxt",), ("*.pb",)),
        looks=lambda disk, head: is_tensorflow_graph(disk),
    ),
    Refusal(
        "a checkpoint of TensorFlow",
        f"{_COPY_ARRAYS}. tf.train.load_checkpoint reads its name without .index",
        text=rb"model_checkpoint_path:",
        files=(("*.index", "*.data-?????-of-?????"), ("*.ckpt.meta",)),
        looks=_is_tensorflow_index,
    ),
    Refusal(
        "the data of a TensorFlow checkpoint",
        f"{_COPY_ARRAYS}. tf.train.load_checkpoint reads it by its name before .data",
        looks=_is_tensorflow_data,
    ),
    Refusal(
        "a TensorFlow Lite model (.tflite)",
        _ORIGINAL,
        magic=((4, b"TFL3"),),
        files=(("*.tflite",),),
    ),
    Refusal(
        "a JAX checkpoint of orbax",
        f"{_COPY_ARRAYS}. orbax.checkpoint reads it",
        files=(
            ("_METADATA",),
            ("_CHECKPOINT_METADATA",),
            ("manifest.ocdbt",),
            ("default/", "metadata/"),
        ),
    ),
    Refusal(
        "a JAX checkpoint of flax (MessagePack)",
        f"{_COPY_ARRAYS}. flax.serialization.msgpack_restore reads it",
        files=(("*.msgpack",),),
        looks=_is_msgpack,
    ),
    _PADDLE,
    Refusal("an array file of MXNet (.params)", _COPY_ARRAYS, magic=((0, b"\x12\x01" + bytes(6)),)),
    _SKLEARN,
    # Graphs for running.
    Refusal(
        "an ONNX graph",
        f"{_ORIGINAL}, or torch.save({{t.name: torch.from_numpy(onnx.numpy_helper.to_array(t)"
        ".copy()) for t in onnx.load('model.onnx').graph.initializer}, 'weights.pt')",
        files=(("*.onnx",),),
        looks=lambda disk, head: is_onnx(disk),
    ),
    Refusal(
        "a Core ML model (.mlmodel, .mlpackage)",
        _ORIGINAL,
        files=(("Manifest.json", "Data/"), ("*.mlmodel",), ("*.mlpackage/",)),
        looks=lambda disk, head: is_coreml(disk),
    ),
    Refusal(
        "a model of OpenVINO (.xml, .bin)",
        _ORIGINAL,
        text=rb"(<\?xml[^>]*>\s*)?<net\b",
        files=(("*.xml", "*.bin"),),
    ),
    Refusal("an engine of TensorRT", _ORIGINAL, magic=((0, b"ptrt"), (0, b"ftrt"))),
    # Arrays.
    Refusal(
        "a NumPy array",
        "torch.save({'name': torch.from_numpy(numpy.load('weights.npy'))}, 'weights.pt'), under "
        "the name that the tensor has in its model",
        magic=((0, b"\x93NUMPY"),),
    ),
    Refusal(
        "a pickle of NumPy arrays",
        "if you trust the file, load it with pickle and save its arrays as tensors: "
        "torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, "
        "'weights.pt')",
        pickled=tuple(
            f"numpy.{place}"
            for core in ("core", "_core")
            for place in (f"{core}.multiarray._reconstruct", f"{core}.numeric._frombuffer")
        ),
    ),
    Refusal(
        "a MATLAB file",
        "scipy.io.loadmat reads it; save its arrays with torch.save",
        magic=((0, b"MATLAB 5.0 MAT-file"),),
    ),
    # Archives around whatever it is.
    Refusal("a gzip archive", _UNPACK, magic=((0, b"\x1f\x8b"),)),
    Refusal("an xz archive", _UNPACK, magic=((0, b"\xfd7zXZ"),)),
    Refusal("a bzip2 archive", _UNPACK, magic=((0, b"BZh"),)),
    Refusal("a zstd archive", _UNPACK, magic=((0, b"\x28\xb5\x2f\xfd"),)),
    Refusal("an lz4 archive", _UNPACK, magic=((0, b"\x04\x22\x4d\x18"),)),
    Refusal("a 7z archive", _UNPACK, magic=((0, b"7z\xbc\xaf"),)),
    Refusal("a rar archive", _UNPACK, magic=((0, b"Rar!\x1a\x07"),)),
    Refusal(
        "a tar archive",
        f"{_UNPACK}: a .nemo file holds model_weights.ckpt",
        magic=((257, b"ustar"),),
    ),
    # The first byte of a zlib stream, and those that mark its four levels of compression.
    Refusal(
        "a zlib stream, as joblib writes it",
        _UNPACK,
        magic=tuple((0, b"x" + level) for level in (b"\x01", b"\x5e", b"\x9c", b"\xda")),
    ),
    # Text.
    Refusal(
        "a web page",
        "download the file again: its address led to a page, as for a log-in or an error",
        text=rb"<!doctype html|<html",
    ),
    Refusal("a web page or XML text", "give the file that holds the weights", text=rb"<"),
    Refusal(
        "JSON text",
        "give the file or folder that holds the weights; of shards, the folder or its *.index.json",
        text=rb"\{",
    ),
)
