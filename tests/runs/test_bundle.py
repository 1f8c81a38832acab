"""What a support bundle holds, and the canaries that it must not hold; known errors and their causes."""

import getpass
import io
import json
import os
import socket
import zipfile
from pathlib import Path

import pytest

from library.runs import bundle, explain, reader, redaction
from library.runs.record import Record

CANARIES = {
    "output_name": "canary_princess",
    "training_comment": "canary comment",
    "caption_prefix": "canaryprefix, ",
    "metadata_title": "Canary title",
    "wandb_api_key": "canarykey1234567890",
    "huggingface_token": "hf_canarytoken12345",
    "pretrained_model_name_or_path": "/srv/canary models/base canary.safetensors",
    "log_prefix": "canarylog",
}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """The bundle of a failed run in whose every corner a canary sits, file by file."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", "canaryenvironment")
    concept = tmp_path / "canary data" / "10_canary person"
    concept.mkdir(parents=True)
    (concept / "canaryimage.png").write_bytes(b"")
    (concept / "canaryimage.txt").write_text("a canary caption, red hair\nsecond canary line", encoding="utf-8")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a canary prompt --w 64 --n ugly canary\n", encoding="utf-8")
    config = {
        "data": {"train_data_dir": str(concept.parent), "train_batch_size": 4, "resolution": "1024,1024"},
        "optim": {"optimizer_type": "AdamW8bit", "optimizer_args": ["weight_decay=0.1"]},
        "sample": {"sample_prompts": str(prompts)},
        "other": CANARIES,
    }
    with (
        pytest.raises(RuntimeError),
        Record.start(config, "sdxl_train", tmp_path / "out", "canary_princess", "x") as run,
    ):
        run.plan(10)
        run.step({"step": 1, "loss": 0.25, "lr": {"unet": 1e-4}})
        run.event("sample", file=str(tmp_path / "out/sample/canary_princess_1.png"), step=1, prompt="a canary prompt")
        run.event("saved", file=str(tmp_path / "out/canary_princess.safetensors"), step=1, bytes=7)
        run.event("warning", text=f"{concept / 'canaryimage.png'} is odd")
        run.say("caption was: a canary caption, red hair")
        for word in (
            concept / "canaryimage.png",
            Path.home() / "canary.txt",
            "C:\\Users\\canary\\x y.bin",
            "~/canary.toml",
            "\\\\canaryserver\\share",
            "hf_canary1234567",
            f"{'ab12' * 10} canary"[:40],
            "token=canarytoken",
        ):
            run.say(f"read {word} ?token=canarytoken")
        run.say(f"{getpass.getuser()}canary" if getpass.getuser() != "root" else "nobody")
        raise RuntimeError(f"cannot read {concept / 'canaryimage.png'}")
    packed = bundle.bundle_run(
        reader.find_run(run.id), json.dumps({"runs": str(tmp_path / "canary home"), "gpu": "none"})
    )
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        assert file.testzip() is None
        return {name: file.read(name).decode("utf-8") for name in file.namelist()}


def test_a_bundle_holds_no_canary(opened):
    for name, content in opened.items():
        lines = [line for line in content.splitlines() if "canary" in line.lower()]
        assert not lines, (name, lines)
        assert "ab12" * 10 not in content and str(Path.home()) + os.sep not in content.replace("/root/", "")
        assert len(socket.gethostname()) < 4 or socket.gethostname() not in content


PLACES = [  # of the program, of the user, and a line with what is left of it
    ("/tmp/ci", "/tmp/cihome", "read /tmp/cihome/cat.png", "read <path>"),
    ("/tmp/ci", "/tmp/cihome", "/tmp/ci/library/x.py in /tmp/cihome", "<program>/library/x.py in <home>"),
    ("/tmp/cihome", "/tmp/ci", "read /tmp/cihome/library/x.py", "read <program>/library/x.py"),
    ("/home/me/kohya", "/home/me", "read /home/me/kohya/library/x.py", "read <program>/library/x.py"),
    ("/home/me/kohya", "/home/me", "read /home/me.", "read <home>."),
    ("/home/me/kohya", "/home/me", "read /home/me2/cat.png", "read <path>"),
    ("/home/me/kohya", "/home/me", "error:/home/me-old/cat.png", "error:<path>"),
    ("/opt/k", "/opt/k/home", "read /opt/k/home", "read <home>"),
    ("D:\\k", "C:\\Users\\me", "C:\\Users\\mere\\cat and D:\\k\\library", "<path>"),
    ("D:\\k", "C:\\Users\\me", "D:\\k\\x.py of C:\\Users\\me", "<program>\\x.py of <home>"),
]


@pytest.mark.parametrize(("program", "home", "line", "left"), PLACES)
def test_a_path_is_known_only_up_to_a_separator(tmp_path, monkeypatch, program, home, line, left):
    monkeypatch.setattr(redaction, "PROJECT_ROOT", program)
    monkeypatch.setattr(redaction, "_people", lambda: [(home, "<home>")])
    with Record.start({}, "sdxl_train", tmp_path, "x", "x") as run:
        pass
    assert redaction.redactor_for(reader.run_at(run.folder)).text(line) == left


def test_a_bundle_says_what_helps(opened):
    assert set(opened) == {"README.txt", "run.json", "progress.jsonl", "log.txt", "doctor.json"}
    facts = json.loads(opened["run.json"])
    assert facts["state"] == "failed" and facts["error"].startswith("RuntimeError: cannot read")
    assert facts["versions"]["torch"] and facts["config"]["data"]["train_batch_size"] == 4
    assert facts["config"]["optim"] == {"optimizer_type": "AdamW8bit", "optimizer_args": ["weight_decay=0.1"]}
    assert facts["config"]["other"]["training_comment"] == "<set>" and "wandb_api_key" not in facts["config"]["other"]
    kinds = [json.loads(line) for line in opened["progress.jsonl"].splitlines()]
    assert [event["kind"] for event in kinds] == ["step", "sample", "saved", "warning", "error"]
    assert kinds[0]["loss"] == 0.25 and kinds[2]["bytes"] == 7
    assert "Traceback" in opened["log.txt"] and "<program>/tests/runs/test_bundle.py" in opened["log.txt"]


CORPUS = [  # what users of trainers have pasted, cut down, and a word of the advice
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.99 GiB total)",
        "batch size",
    ),
    ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "batch size"),
    ("OSError: [Errno 28] No space left on device", "disk is full"),
    ("OSError: [Errno 122] Disk quota exceeded: 'x'", "disk is full"),
    ("OSError: The paging file is too small for this operation to complete. (os error 1455)", "paging file"),
    ("OSError: [WinError 1455] Die Auslagerungsdatei ist zu klein", "paging file"),
    ("numpy.core._exceptions.MemoryError: Unable to allocate 1.2 GiB for an array with shape (3, 2)", "CPU memory"),
    (
        "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.",
        "system ended the training",
    ),
    ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: x\n  exitcode  : -9 (pid: 7)", None),
    ("Killed", "system ended the training"),
    ("RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode", "hared memory"),
    ("DataLoader worker (pid 77) is killed by signal: Bus error. insufficient shared memory (shm).", "hared memory"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "not built for this GPU"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver"),
    ("AssertionError: Torch not compiled with CUDA enabled", "nvidia-smi"),
    ("RuntimeError: CUDA error: invalid device ordinal", "GPU numbers"),
    ("RuntimeError: Distributed package doesn't have NCCL built in", "NCCL"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error", "NCCL"),
    (
        "ConnectionError: Tried to launch distributed communication on port `29500`, but port 29500 is already in use",
        "port",
    ),
    ("ModuleNotFoundError: No module named 'triton'", "triton-windows"),
    ("torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found", "C++ compiler"),
    ("torch._inductor.exc.InductorError: RuntimeError: Compiler: cl is not found.", "C++ compiler"),
    ("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: PTXASError: PTXAS error", "ptxas"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "Download it again"),
    (
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "Download it again",
    ),
    ("_pickle.UnpicklingError: invalid load key, '<'.", "damaged"),
    ("PIL.UnidentifiedImageError: cannot identify image file '/x/a b.png'", "a b.png cannot be read as an image"),
    ("RuntimeError: Error(s) in loading state_dict for UNet: size mismatch for conv_in.weight", "another model family"),
    ("huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file", "network"),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model is restricted", "licence"),
    ("OSError: [Errno 24] Too many open files", "ulimit"),
    ("RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float", "mixed_precision"),
    ("RuntimeError: Input type (c10::Half) and bias type (float) should be the same", "mixed_precision"),
    ("RuntimeError: expected scalar type Half but found Float", "mixed_precision"),
    ("RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'", "number format"),
    ("ValueError: Attempting to unscale FP16 gradients.", "fp16"),
    ("RuntimeError: CUDA Setup failed despite GPU being available. libbitsandbytes_cpu.so", "bitsandbytes"),
    ("RuntimeError: Numpy is not available", "set-up"),
    ("ModuleNotFoundError: No module named 'pkg_resources'", "pkg_resources is missing"),
    ("ImportError: cannot import name 'cached_download' from 'huggingface_hub'", "cached_download"),
    ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])", "wandb"),
    ("ImportError: DLL load failed while importing _C: The specified module could not be found.", "Visual C++"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "GPU reported an error"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)", "other programs"),
    ("PermissionError: [Errno 13] Permission denied: '/config-1.toml'", "config-1.toml"),
    ("OSError: [Errno 30] Read-only file system: '/x'", "cannot be written"),
    ("Segmentation fault (core dumped)", "library crashed"),
    (
        "RuntimeError: CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`",
        "GPU reported an error",
    ),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "other programs"),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB", "batch size"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "batch size"),
    ("RuntimeError: Triton Error [CUDA]: out of memory", "batch size"),
    ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", "not built for this GPU"),
    ("ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU", "bf16"),
    ("NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:", "xformers"),
    ("ModuleNotFoundError: No module named 'xformers'", "xformers"),
    ("RuntimeError: NaN detected in latents: /x/b.png", "no_half_vae"),
    ("AssertionError: No data found. Please verify arguments (train_data_dir must be the parent of folders)", "10_cat"),
    ("OSError: Can't load tokenizer for 'openai/clip-vit-large-patch14'. If you were trying to load", "complete model"),
    ("OSError: We couldn't connect to 'https://huggingface.co' to load this file", "network"),
    (
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded",
        "network",
    ),
    ("huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co", "network"),
    ("huggingface_hub.errors.RepositoryNotFoundError: 404. Repository Not Found for url", "permission"),
    ("ValueError: optimizer got an empty parameter list", "Nothing is trained"),
    ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", "Nothing is trained"),
    (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
        "different devices",
    ),
    ("RuntimeError: The size of tensor a (77) must match the size of tensor b (227) at dimension 1", ".npz"),
    ("RuntimeError: shape '[1, 64, 64]' is invalid for input of size 999", ".npz"),
    ("zipfile.BadZipFile: File is not a zip file", ".npz"),
    ("EOFError: No data left in file", ".npz"),
    ("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9 in position 3", "UTF-8"),
    ("json.decoder.JSONDecodeError: Expecting ',' delimiter: line 3 column 1 (char 9)", "quote or a comma"),
    ("tomllib.TOMLDecodeError: Invalid value (at line 3, column 9)", "quote or a comma"),
    ("ValueError: could not convert string to float: '1e-4,'", "number was expected"),
    ("AttributeError: module 'numpy' has no attribute 'bool'", "fit together"),
    ("RecursionError: maximum recursion depth exceeded", "recursion"),
    ("torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with fullgraph=True", "cache_size_limit"),
    ("torch._dynamo.exc.Unsupported: Graph break in user code", "Compiling failed"),
    ("OSError: [WinError 193] %1 is not a valid Win32 application", "64-bit"),
    ('OSError: [WinError 1114] A DLL initialization routine failed. Error loading "C:\\x\\c10.dll"', "Visual C++"),
    (
        "PermissionError: [WinError 32] The process cannot access the file because it is being used: 'x'",
        "virus scanner",
    ),
    (
        "RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file",
        "disk is full",
    ),
    ("RuntimeError: DataLoader worker (pid(s) 123, 124) exited unexpectedly", "fewer data loader workers"),
    (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15",
        "ended by a closed terminal",
    ),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. TCPStore", "main_process_ip"),
    (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        "text encoders",
    ),
    ("torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout", "NCCL"),
    ("ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found", "older than"),
    ("OSError: [Errno 116] Stale file handle: '/mnt/x'", "became unavailable"),
    ("PIL.Image.DecompressionBombError: Image size (300000000 pixels) exceeds limit", "too large"),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", "damaged"),
    ("RuntimeError: Found no NVIDIA driver on your system.", "nvidia-smi"),
    ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "driver"),
    ("sdxl_train.py: error: unrecognized arguments: --lowwram", "lowwram"),
    ("MemoryError", "CPU memory"),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: 9 bytes",
        "CPU memory",
    ),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "GPU reported an error"),
    ("OSError: [Errno 5] Input/output error: '/mnt/nas/x.safetensors'", "became unavailable"),
    ("huggingface_hub.errors.HfHubHTTPError: 403 Client Error: Forbidden for url", "permission"),
    ("RuntimeError: GPU is lost. Reboot the system to recover this GPU", "GPU reported an error"),
]


@pytest.mark.parametrize(("said", "words"), CORPUS)
def test_known_errors_have_a_cause_and_a_cure(said, words):
    log = f'step 7/100, loss 0.1\nTraceback (most recent call last):\n  File "x.py", line 1, in f\n{said}\n'
    for more in ("", "Traceback (most recent call last):\nsubprocess.CalledProcessError: Command died\n"):
        cause = explain.cause(log + more)
        assert words is None or words in str(cause), cause
        assert "{0}" not in (str(cause or "")) and "\n" not in (str(cause or ""))


def test_the_last_exception_counts_and_warnings_before_it_do_not():
    log = "WARNING: No module named 'triton'\nConnectionError: retry\nTraceback\nRuntimeError: CUDA out of memory.\n"
    assert (str(explain.cause(log) or "")).startswith("The GPU ran out of memory. Lower the batch size")
    assert explain.cause("WARNING size mismatch for nothing\nTraceback\nZeroDivisionError: by zero") == (
        "ZeroDivisionError: by zero"
    )
