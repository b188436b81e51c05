"""Call files: written by SPARSE_MLA_DUMP and save_call, read by ``sparse-mla run``."""

from __future__ import annotations

from ..record import ErrorRecord, FileError, Solution
from ._programs import strict

_SAVE = """\
import os, tempfile
import torch
from sparse_mla.callfile import Call, load_call, save_call

path = os.path.join(tempfile.mkdtemp(), "call.safetensors")
tensors = {
    "q": torch.randn(4, 64, 576).to(torch.float8_e4m3fn),
    "kv": torch.randn(300, 1, 576).to(torch.float8_e4m3fn),
    "indices": torch.randint(0, 300, (4, 1, 128), dtype=torch.int32),
    "q_scale": torch.ones(1),
    "kv_scale": torch.ones(1),
}
"""
_CALL = (
    'call = Call("sparse_mla_q8kv8_prefill_fwd", tensors, {"sm_scale": 192 ** -0.5, "d_v": 512},'
    " {})\n"
)
_READ = ("sparse-mla run", "sparse-mla check", "load_call")
_WRITE = ("sparse-mla run", "save_call", "SPARSE_MLA_DUMP")

RECORDS = (
    ErrorRecord(
        id="file-unreadable",
        exception=FileError,
        title="The file cannot be read",
        message="cannot read {path}: {reason}",
        detail="The operating system refused to open or read it.",
        fix="check the path, the working directory and the permissions.",
        yours="{path} could not be read: {reason}.",
        meaning=(
            "Nothing has been looked at yet: the file does not exist, is a directory, or may not be"
            " read by this user."
        ),
        trigger=(
            "opening or reading the file raises an OSError, or there is not enough memory for it"
        ),
        situations=(
            "The path is relative to another directory, or inside another container.",
            (
                "The dump of a failed call belongs to the user of the serving process, with"
                " permissions for that user only."
            ),
            (
                "SPARSE_MLA_DUMP removed the file because the call returned normally;"
                " SPARSE_MLA_DUMP_ALL=1 keeps every one."
            ),
        ),
        solutions=(
            Solution("Look at what is there.", "ls -l DIRECTORY"),
            Solution(
                "Copy a dump with the right owner.",
                "sudo install -o $USER /dumps/call.safetensors .",
            ),
        ),
        before=_SAVE + "call = load_call(path)\n",
        after=_SAVE + _CALL + "save_call(path, call)\ncall = load_call(path)\n",
        related=("file-not-safetensors", "file-not-written", "file-too-large"),
        operators=_READ,
        since="0.1.0",
        symptoms=(
            "No such file or directory",
            "Permission denied",
            "Is a directory",
            "missing file",
        ),
    ),
    ErrorRecord(
        id="file-not-safetensors",
        exception=FileError,
        title="The file is not a valid safetensors file",
        message="{path} is not a valid safetensors file: {reason}",
        detail="Its header or its size does not fit the format; nothing of it was loaded.",
        fix="copy the file again, or capture the call again with SPARSE_MLA_DUMP.",
        yours="{path} was refused: {reason}.",
        meaning=(
            "Call files may come from strangers, so that only safetensors is read and its header is"
            " checked against the file's size before any memory is taken. Pickle files (.pt, .bin)"
            " can run code and are never opened."
        ),
        trigger=(
            "the header is not valid JSON of the expected form, its offsets overlap or leave gaps,"
            " or the file is shorter or longer than they say"
        ),
        situations=(
            "The transfer was cut off, or the disk was full while it was written.",
            "The file is a Git LFS pointer of a few lines instead of the data.",
            "It is a torch.save file (.pt, .pth) or a NumPy archive with another name.",
            "It is an error page that a download tool saved.",
        ),
        solutions=(
            Solution(
                "Look at the first bytes: eight bytes of length, then '{'.",
                "head -c 200 call.safetensors | xxd | head",
            ),
            Solution("Fetch Git LFS files.", "git lfs pull"),
            Solution(
                "Convert your own torch.save file, if you trust it.",
                "save_call('call.safetensors', Call(operator, torch.load('call.pt',"
                " weights_only=True), arguments, {}))",
            ),
        ),
        before=_SAVE
        + _CALL
        + "save_call(path, call)\nos.truncate(path, 1000)\ncall = load_call(path)\n",
        after=_SAVE + _CALL + "save_call(path, call)\ncall = load_call(path)\n",
        related=("file-unreadable", "file-not-a-call", "file-too-large"),
        operators=_READ,
        since="0.1.0",
        symptoms=("truncated", "corrupt", "git lfs pointer", "torch.save", "pickle", ".pt file"),
        foreign=(
            r"(?:Safetensor|SafeTensor)s?Error",
            r"Error while deserializing header: ?\w{0,40}(?P<reason>.{0,200})",
            r"(?:HeaderTooLarge|HeaderTooSmall|InvalidHeader\w{0,40}|MetadataIncompleteBuffer|InvalidOffset)",
        ),
    ),
    ErrorRecord(
        id="file-too-large",
        exception=FileError,
        title="The file is larger than the limit",
        message="{path} would need {bytes} bytes, more than the limit of {limit}",
        detail="Nothing was loaded; the limit keeps an unknown file from taking all memory.",
        fix="if you trust the file, raise the limit: load_call(path, max_bytes={bytes}).",
        yours="{path} would need {bytes} bytes; the limit is {limit}.",
        meaning=(
            "A call file holds the inputs of one call. A whole KV cache of a long context can be"
            " many gigabytes, which is refused unless asked for."
        ),
        trigger="the size of the file, or of the tensors it describes, exceeds `max_bytes`",
        situations=(
            (
                "SPARSE_MLA_DUMP wrote the whole cache of a server, of which the call reads a few"
                " thousand rows."
            ),
            "It is a model checkpoint, not a call file.",
            "The tensors were recorded with large gaps between their rows, which take memory too.",
        ),
        solutions=(
            Solution(
                "Raise the limit for a file that you trust.",
                "call = load_call(path, max_bytes=64 << 30)",
            ),
            Solution(
                "Keep only the rows that the call selects, and renumber the indices.",
                "rows, inverse = indices.clamp(min=0).unique(return_inverse=True)\nkv, indices ="
                " kv[rows], torch.where(indices < 0, -1, inverse).to(torch.int32)",
            ),
        ),
        before=_SAVE + _CALL + "save_call(path, call)\ncall = load_call(path, max_bytes=1000)\n",
        after=_SAVE
        + _CALL
        + "save_call(path, call)\ncall = load_call(path, max_bytes=1_000_000)\n",
        related=("file-not-safetensors", "file-unreadable"),
        operators=_READ,
        since="0.1.0",
        symptoms=("out of memory", "max_bytes", "large dump", "whole KV cache"),
    ),
    ErrorRecord(
        id="file-not-a-call",
        exception=FileError,
        title="The safetensors file does not hold a call",
        message="{path} is not a sparse-mla call file: {reason}",
        detail=(
            "It is valid safetensors, but its metadata or tensors do not describe a call that this"
            " version knows."
        ),
        fix="write it with sparse_mla.callfile.save_call, or capture a call with SPARSE_MLA_DUMP.",
        yours="{path} was refused: {reason}.",
        meaning=(
            "A call file says which operator it calls and with which numbers, in its metadata."
            " Without that, tensors named q and kv could mean anything."
        ),
        trigger=(
            "the metadata lacks or contradicts format, version or operator, or the file holds"
            " tensors that a call does not have"
        ),
        situations=(
            (
                "It is a model checkpoint, or tensors saved with safetensors.torch.save_file and no"
                " metadata."
            ),
            "It was written by a newer version of this library.",
            "It is the result file of sparse-mla run -o, which holds outputs only.",
        ),
        solutions=(
            Solution(
                "Save the tensors as a call.",
                "save_call('call.safetensors', Call('sparse_mla_prefill', tensors, {'sm_scale': 192"
                " ** -0.5}, {}))",
            ),
            Solution("Capture it where it happens.", "SPARSE_MLA_DUMP=/tmp/calls python serve.py"),
        ),
        before=_SAVE + "from safetensors.torch import save_file\n\nsave_file(tensors, path)\ncall ="
        " load_call(path)\n",
        after=_SAVE + _CALL + "save_call(path, call)\ncall = load_call(path)\n",
        related=("file-not-safetensors", "file-tensor-missing"),
        operators=_READ,
        since="0.1.0",
        symptoms=("checkpoint", "no metadata", "newer version", "result file"),
    ),
    ErrorRecord(
        id="file-tensor-missing",
        exception=FileError,
        title="The call file lacks a tensor",
        message="{path} has no tensor {name}",
        detail=(
            "A call needs q, kv and indices; the file's metadata describes a call, but {name} is"
            " not in it."
        ),
        fix="capture the call again, or add {name} and save it with save_call.",
        yours="{path} has no tensor {name}.",
        meaning=(
            "Without one of the three there is nothing to compute. Scales, sink and lengths may be"
            " absent; whether the operator needs them is its contract's business."
        ),
        trigger=(
            "q, kv or indices is neither a tensor of the file nor recorded in its metadata as"
            " something else"
        ),
        situations=(
            "The file was put together by hand, with other names (query, kv_cache, topk_indices).",
            "A script that shrank the file dropped a tensor.",
        ),
        solutions=(
            Solution(
                "Use the operator's argument names.",
                "tensors = {'q': q, 'kv': kv, 'indices': indices, 'q_scale': q_scale, 'kv_scale':"
                " kv_scale}",
            ),
            Solution("Capture it again.", "SPARSE_MLA_DUMP=/tmp/calls python serve.py"),
        ),
        before=_SAVE
        + 'del tensors["indices"]\n'
        + _CALL
        + "save_call(path, call)\ncall = load_call(path)\n",
        after=_SAVE + _CALL + "save_call(path, call)\ncall = load_call(path)\n",
        related=("file-not-a-call",),
        operators=_READ,
        since="0.1.0",
        symptoms=("KeyError", "topk_indices", "kv_cache", "missing key"),
    ),
    ErrorRecord(
        id="file-not-written",
        exception=FileError,
        title="A file cannot be written",
        message="cannot write {path}: {reason}",
        detail="The operating system refused; nothing is left at that path.",
        fix="check that the directory exists, that you may write there and that the disk has room.",
        yours="{path} could not be written: {reason}.",
        meaning=(
            "Files are written beside their target and renamed, so that a reader never sees half a"
            " file and a failed write leaves the old one alone."
        ),
        trigger="writing or renaming raises an OSError",
        situations=(
            "The directory of the path does not exist; it is not made for you.",
            "The disk, the quota or a container's /tmp is full.",
            "The path is a directory, or on a read-only mount.",
        ),
        solutions=(
            Solution("Make the directory.", "mkdir -p results"),
            Solution("Look at the free space.", "df -h ."),
        ),
        before=_SAVE + _CALL + 'path = os.path.join(os.path.dirname(path), "missing",'
        ' "call.safetensors")\nsave_call(path, call)\n',
        after=_SAVE
        + _CALL
        + 'path = os.path.join(os.path.dirname(path), "call.safetensors")\nsave_call(path, call)\n',
        related=("dump-failed", "file-unreadable"),
        operators=_WRITE[:2],
        since="0.1.0",
        symptoms=(
            "No space left on device",
            "Read-only file system",
            "Permission denied",
            "disk full",
        ),
    ),
    ErrorRecord(
        id="dump-failed",
        exception=FileError,
        title="A call could not be recorded (a warning)",
        message="cannot write the call to {path}: {reason}",
        detail="The call itself goes on; only its record is missing.",
        fix=(
            "point SPARSE_MLA_DUMP or SPARSE_MLA_CAPTURE at a writable directory with room for the"
            " inputs, or unset it."
        ),
        yours="Calls could not be written to {path}: {reason}.",
        meaning=(
            "SPARSE_MLA_DUMP and captures are a diagnosis, and a diagnosis must not stop a server."
            " So a failure is a RuntimeWarning, said once for each reason."
        ),
        trigger=(
            "SPARSE_MLA_DUMP or SPARSE_MLA_CAPTURE is set, or a capture is open, and the inputs of"
            " a call cannot be written there or do not fit into what the capture may still write"
        ),
        situations=(
            "The directory is read-only, belongs to another user, or its path is a file.",
            "The disk is full; a dump holds the whole kv tensor.",
            "The call runs inside CUDA-graph capture, where nothing can be copied to the host.",
            (
                "A capture has written as much as SPARSE_MLA_CAPTURE_MAX_BYTES (1 GiB by default)"
                " lets it, or one call is larger than that."
            ),
        ),
        solutions=(
            Solution(
                "Choose another directory.", "export SPARSE_MLA_DUMP=/var/tmp/sparse-mla-calls"
            ),
            Solution(
                "Let a capture write more, or record a smaller share of the calls.",
                "export SPARSE_MLA_CAPTURE_MAX_BYTES=20e9 SPARSE_MLA_CAPTURE_RATE=0.01",
            ),
            Solution(
                "Reproduce the call without CUDA graphs to record it (in SGLang,"
                " --disable-cuda-graph; in vLLM, --enforce-eager)."
            ),
        ),
        before=(
            "import os, tempfile,"
            ' warnings\n\nwarnings.simplefilter("error")\nos.environ["SPARSE_MLA_DUMP"] ='
            " tempfile.mkstemp()[1]\n"
        )
        + strict(),
        after=(
            "import os, tempfile,"
            ' warnings\n\nwarnings.simplefilter("error")\nos.environ["SPARSE_MLA_DUMP"] ='
            " tempfile.mkdtemp()\n"
        )
        + strict(),
        related=("file-not-written",),
        operators=("SPARSE_MLA_DUMP", "SPARSE_MLA_CAPTURE"),
        since="0.1.0",
        symptoms=(
            "dump directory",
            "capture directory",
            "cuda graph capture",
            "disk full",
            "nothing recorded",
        ),
    ),
)
