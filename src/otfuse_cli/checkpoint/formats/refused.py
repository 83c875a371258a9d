"""Files and folders that hold no checkpoint we read: how each is told, what it is, what to do.

One row for each container, with every way it shows: first bytes, records of a zip archive, classes
of a pickle, files of a folder, or a test where nothing simpler tells it. A file that a format
claims never comes here, but for the placeholders; within each way the first row that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import UnreadableInput
from ..disk import Disk
from ..wrappers import SAVE_STATE_DICT
from .unmarked import (
    is_coreml,
    is_msgpack,
    is_onnx,
    is_tensorflow_data,
    is_tensorflow_graph,
    is_tensorflow_index,
)

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


_UNPACK = "unpack it, and give the checkpoint inside"
_COPY_ARRAYS = (
    "build the same network in torch, copy the arrays into it (Keras, JAX and Paddle store the "
    f"kernels of linear layers transposed), and save that: {SAVE_STATE_DICT}"
)
_ORIGINAL = "give the torch checkpoint that it was made from"
_FROM_PROGRAM = "torch.save(torch.jit.load('model.pt').state_dict(), 'weights.pt')"

EMPTY_FILE = Refusal(
    "an empty file",
    "copy or download the file again",
    what="an empty file",
    why="it has 0 bytes",
)
LFS_POINTER = Refusal(
    "a Git LFS pointer",
    "run git lfs pull",
    what="a Git LFS pointer, not the weights",
    why="the repository was cloned without its large files",
    magic=((0, b"version https://git-lfs.github.com/spec"),),
)
NUMPY_ARCHIVE = Refusal(
    "an archive of NumPy arrays (.npz)",
    "torch.save({name: torch.from_numpy(array) for name, array in numpy.load('weights.npz').items()"
    "}, 'weights.pt')",
)
SKLEARN_DUMP = Refusal(
    "a pickle or joblib dump of scikit-learn or its like; nothing was run",
    "give networks of torch: models of scikit-learn have no layers that could be matched",
    pickled=("sklearn", "joblib", "xgboost", "lightgbm", "catboost"),
)
PADDLE_STATE = Refusal(
    "a state dict of PaddlePaddle (.pdparams)",
    _COPY_ARRAYS,
    pickled=("paddle",),
    files=(("*.pdparams",), ("*.pdiparams",)),
)

REFUSALS: tuple[Refusal, ...] = (
    EMPTY_FILE,
    LFS_POINTER,
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
    Refusal(
        "the pieces of a DeepSpeed checkpoint",
        "put them together, in that folder: python zero_to_fp32.py . weights",
        files=(("zero_to_fp32.py",),),
    ),
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
        looks=is_tensorflow_graph,
    ),
    Refusal(
        "a checkpoint of TensorFlow",
        f"{_COPY_ARRAYS}. tf.train.load_checkpoint reads its name without .index",
        text=rb"model_checkpoint_path:",
        files=(("*.index", "*.data-?????-of-?????"), ("*.ckpt.meta",)),
        looks=is_tensorflow_index,
    ),
    Refusal(
        "the data of a TensorFlow checkpoint",
        f"{_COPY_ARRAYS}. tf.train.load_checkpoint reads it by its name before .data",
        looks=is_tensorflow_data,
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
        looks=is_msgpack,
    ),
    PADDLE_STATE,
    Refusal("an array file of MXNet (.params)", _COPY_ARRAYS, magic=((0, b"\x12\x01" + bytes(6)),)),
    SKLEARN_DUMP,
    # Graphs for running.
    Refusal(
        "an ONNX graph",
        f"{_ORIGINAL}, or torch.save({{t.name: torch.from_numpy(onnx.numpy_helper.to_array(t)"
        ".copy()) for t in onnx.load('model.onnx').graph.initializer}, 'weights.pt')",
        files=(("*.onnx",),),
        looks=is_onnx,
    ),
    Refusal(
        "a Core ML model (.mlmodel, .mlpackage)",
        _ORIGINAL,
        files=(("Manifest.json", "Data/"), ("*.mlmodel",), ("*.mlpackage/",)),
        looks=is_coreml,
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
