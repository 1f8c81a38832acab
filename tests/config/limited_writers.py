"""Write files of all kinds in a process whose files may have 4 KB, and print what each writer raised."""

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from PIL import Image

from library.adapter_files.storage import FilePlan
from library.data.cache_files import write_cache_file
from library.files import write_atomic, write_folder_atomic
from library.train.saving import state_files

LIMIT = 4096  # bytes


def main(folder: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    raised = {}
    for name, write in writers(Path(folder)).items():
        try:
            write()
        except Exception as error:
            raised[name] = type(error).__name__
        else:
            raised[name] = ""
    print(json.dumps(raised))


def writers(folder: Path) -> dict[str, Callable[[], object]]:
    tensors = {"a": torch.rand(10_000)}
    arrays = {"a": tensors["a"].numpy()}
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), dtype=np.uint8))
    state = state_files.State({state_files.WEIGHTS: tensors}, {}, {"current_step": 1})
    values = state_files.State({}, {state_files.OPTIMIZER: tensors}, {"current_step": 1})
    at = (folder / "file").with_suffix
    return {
        "bytes": lambda: write_atomic(at(".bin"), bytes(10_000)),
        "torch": lambda: write_atomic(at(".pt"), lambda path: torch.save(tensors, path)),
        "safetensors of torch": lambda: write_atomic(
            at(".safetensors"), lambda path: safetensors.torch.save_file(tensors, path)
        ),
        "safetensors of numpy": lambda: write_atomic(
            at(".safetensors"), lambda path: safetensors.numpy.save_file(arrays, path)
        ),
        "npz": lambda: write_atomic(at(".npz"), lambda path: np.savez(path, **arrays)),
        "png": lambda: write_atomic(at(".png"), picture.save),
        "webp": lambda: write_atomic(at(".webp"), lambda path: picture.save(path, lossless=True)),
        "cache": lambda: write_cache_file(str(at(".safetensors")), arrays, {}),
        "old cache": lambda: write_cache_file(str(at(".npz")), arrays, {}),
        "plan": lambda: write_atomic(at(".safetensors"), lambda path: FilePlan.of_tensors(tensors).write(path, {})),
        "weights of a state": lambda: write_folder_atomic(folder / "state", state._fill),
        "values of a state": lambda: write_folder_atomic(folder / "state", values._fill),
    }
