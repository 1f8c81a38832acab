"""Errors that are known well enough to advise on: a pattern of the log, and the sentence that says what to do.

The first that fits wins, so what is narrow stands before what is wide. {0} is what the pattern's first group caught.
"""

GPU_MEMORY = (
    "The GPU ran out of memory. Lower the batch size or resolution, turn on gradient checkpointing, or swap blocks."
)
RAM = "The computer ran out of memory (RAM). Use fewer data loader workers, or cache to disk instead of memory."
DISK = "The disk is full. Free some space, or choose another output folder."
SET_UP = "Run the set-up again (./setup.sh)"

KNOWN = (
    # Memory and disk
    (r"CUDA out of memory|Triton Error \[CUDA\]: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
     r"|CUDNN_STATUS_ALLOC_FAILED|HIP out of memory"
     r"|CUDA error: out of memory|cudaErrorMemoryAllocation", GPU_MEMORY),
    (r"The paging file is too small|WinError 1455",
     "Windows ran out of memory for the model's files. Make the paging file larger (System, Advanced, Performance: "
     "32 GB or more), or close other programs."),
    (r"No space left on device|\[Errno 28\]|There is not enough space on the disk|\[Errno 122\]|Disk quota exceeded"
     r"|StorageFull", DISK),
    (r"DefaultCPUAllocator: (?:can't allocate|not enough)|Cannot allocate memory|^MemoryError|std::bad_alloc"
     r"|Unable to allocate .* for an array", RAM),
    # GPU, driver, builds
    (r"no kernel image is available|device kernel image is invalid",
     f"This PyTorch was not built for this GPU. {SET_UP}, so that it picks the right build."),
    (r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old|forward compatibility "
     r"was attempted",
     "The NVIDIA driver is too old for this PyTorch. Update the driver."),
    (r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device",
     f"PyTorch finds no NVIDIA GPU. Check the driver with nvidia-smi, then: {SET_UP[0].lower()}{SET_UP[1:]}."),
    (r"invalid device ordinal|gpu_ids: there is no GPU",
     "A GPU was asked for that this machine does not have. Check the GPU numbers (gpu_ids) and the number of "
     "processes."),
    (r"CUDA error: unspecified launch failure|device-side assert triggered|illegal memory access|uncorrectable ECC"
     r"|GPU is lost|Xid",
     "The GPU reported an error. Start the training again; if it comes back, restart the computer and lower "
     "overclocks."),
    (r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR"
     r"|CUDNN_STATUS_EXECUTION_FAILED",
     "The GPU's libraries could not start, most often because its memory is full. Close other programs that use it."),
    (r"version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",
     f"The system is older than this build of PyTorch needs. Update it, or {SET_UP[0].lower()}{SET_UP[1:]}."),
    (r"\[WinError 126\]|\[WinError 127\]|c10\.dll|fbgemm\.dll|DLL load failed",
     "A library of PyTorch could not be loaded. Install the Microsoft Visual C++ Redistributable, then start again."),
    (r"WinError 193|is not a valid Win32 application",
     f"A program or library is damaged or made for another kind of Windows. {SET_UP}, with 64-bit Python."),
    (r"doesn't support bf16|bf16 mixed precision requires|BFloat16 is not supported",
     "This GPU or device cannot compute in bf16. Set mixed_precision to fp16, or to no."),
    (r"No operator found for `memory_efficient_attention|xformers.*(?:not available|wasn't built)"
     r"|No module named 'xformers'",
     "xformers does not work here. Switch it off: the attention that PyTorch brings along (sdpa) is as fast."),
    # Several processes
    (r"Address already in use|EADDRINUSE|[Pp]ort `?\d+`? is already in use",
     "Another training uses the same network port. Stop it first, or wait until it has ended."),
    (r"Distributed package doesn't have NCCL|NCCL.* (?:is )?not (?:available|built)",
     "This PyTorch has no NCCL, which several GPUs need; Windows has none. Train in one process, or under WSL."),
    (r"Watchdog caught collective operation timeout|NCCL (?:error|operation)|ncclSystemError|ncclUnhandledCudaError"
     r"|ncclInternalError|ncclRemoteError|NCCL WARN",
     "The communication between the GPUs failed (NCCL). See whether one process ended first, raise ddp_timeout, or set "
     "NCCL_P2P_DISABLE=1."),
    (r"Expected to have finished reduction in the prior iteration",
     "With several GPUs, a part that should learn took no part in a step. Train the text encoders on one GPU."),
    (r"Socket Timeout|TCPStore|Connection refused.*(?:gloo|store)|gloo.*Connection",
     "The processes could not connect to each other. Start the training again; between machines, check "
     "main_process_ip and main_process_port."),
    # Compiling
    (r"No module named 'triton'|Cannot find a working triton installation|TritonMissing",
     f"Compiling needs Triton, which is missing. {SET_UP} (on Windows: pip install triton-windows), or switch "
     f"compile off."),
    (r"InvalidCxxCompiler|No working C\+\+ compiler|cl(?:\.exe)? is not found|Compiler: cl is not found"
     r"|Failed to find C compiler|fatal error: Python\.h",
     "Compiling needs a C++ compiler (Linux: g++ and python3-dev; Windows: Visual Studio Build Tools), or "
     "switch compile off."),
    (r"PTXASError|ptxas fatal|ptxas error",
     "The GPU's own compiler (ptxas) failed. Update Triton and the driver, or switch compile off."),
    (r"RecompileLimitExceeded|FailOnRecompileLimitHit|recompile_limit reached|cache_size_limit reached",
     "Too many versions of a block were compiled. Raise compile_cache_size_limit, or use fewer image sizes."),
    (r"torch\._dynamo\.exc|torch\._inductor\.exc|InductorError|BackendCompilerFailed",
     "Compiling failed. Add compile_fallback to go on without it, or switch compile off."),
    # Files
    (r"SafetensorError|HeaderTooLarge|HeaderTooSmall|InvalidHeaderDeserialization|MetadataIncompleteBuffer"
     r"|safetensors file .* (?:corrupt|incomplete)",
     "A .safetensors file is damaged or was not downloaded whole. Download it again, and compare its size."),
    (r"UnpicklingError|PytorchStreamReader failed|invalid load key",
     "A model file is damaged or is no model: download it again, as .safetensors."),
    (r"UnidentifiedImageError.*?'([^']+)'|cannot identify image file '([^']+)'",
     "{0} is no image that can be read: replace or remove it."),
    (r"DecompressionBombError", "An image of the data set is far too large: scale it down."),
    (r"Error\(s\) in loading state_dict|size mismatch for ",
     "The weights do not fit the model: the file is of another model family, or a LoRA of another base or rank."),
    (r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https://huggingface\.co'|Max retries exceeded"
     r"|ConnectionError|Temporary failure in name resolution",
     "A file should come from the network, which cannot be reached. Check the connection, or give the path of a "
     "local file."),
    (r"GatedRepoError|401 Client Error|403 Client Error|Repository Not Found",
     "Hugging Face does not give this model out without permission: accept its licence there and give your token."),
    (r"\[Errno 24\]|Too many open files", "Too many files were open at once. Raise the limit (ulimit -n 65536) "
     r"and start again."),
    (r"Read-only file system|\[Errno 30\]", "The output folder is on a disk that cannot be written. Choose "
     r"another one."),
    (r"Stale file handle|\[Errno 5\]|Input/output error|\[WinError 64\]",
     "A disk or network folder became unavailable. Check it, then resume from the last state."),
    (r"WinError 32|being used by another process",
     "Another program holds a file that is needed. Close it (a viewer, a sync program, a virus scanner), then "
     "start again."),
    (r"PermissionError: .*?'([^']+)'", "The file or folder {0} may not be written or read by you."),
    (r"FileNotFoundError: .*?'([^']+)'", "The file or folder {0} does not exist."),
    (r"PytorchStreamWriter failed|inline_container\.cc.*writing",
     "A file could not be written to its end, most often because the disk is full."),
    (r"BadZipFile|_pickle.*npz|cannot reshape array of size|EOFError: (?:No data left|Ran out of input)",
     "A cache file is damaged. Delete the .npz files beside the images; they are made again."),
    (r"UnicodeDecodeError|UnicodeEncodeError", "A caption or config is not saved as UTF-8: save it again as UTF-8."),
    (r"JSONDecodeError|TOMLDecodeError"
     r"|TomlDecodeError", "A settings file is not written correctly: look at the line that "
     "the log names, most often a quote or a comma."),
    (r"Can't load (?:tokenizer|the configuration|the model)|Can't load feature extractor",
     "A part of the model is missing where it was looked for. Give a complete model folder, or the path of the file."),
    (r"No data found|no images? (?:found|to train)|train_data_dir must be the parent",
     "No images were found. The image folder must hold folders named N_name (such as 10_cat), and those the images."),
    (r"NaN detected in latents|latents .*NaN",
     "An image could not be encoded to numbers. Use no_half_vae, or replace the image that the log names."),
    # Numbers and code
    (r"(?:expected|got) .*?(?:dtype|scalar type).*?(?:Half|BFloat16|Float|float)|mat1 and mat2 must have the same dtype"
     r"|Input type .* and (?:weight|bias) type .* should be the same|expected m1 and m2 to have the same dtype",
     "Two number formats were mixed (such as half and float). Set mixed_precision to bf16, and no full_fp16 or fp8 "
     "beside it."),
    (r"not implemented for 'Half'|not implemented for 'BFloat16'|\"\w+\" not implemented for",
     "This device does not support this number format. Set mixed_precision to no, or train on another GPU."),
    (r"Attempting to unscale FP16 gradients",
     "Weights that learn are in fp16, which cannot be scaled. Use mixed_precision bf16, or fp16 without full_fp16."),
    (r"optimizer got an empty parameter list|does not require grad and does not have a grad_fn",
     "Nothing is trained with these settings. Check the learning rates, and which parts are trained."),
    (r"Expected all tensors to be on the same device",
     "Parts of the model were on different devices. Switch off swapping or lowram, and report it with a support "
     "bundle."),
    (r"The size of tensor a \(\d+\) must match the size of tensor b|shape '.*' is invalid for input of size",
     "Tensor sizes do not match, most often from caches of other settings. Delete the .npz files beside the images."),
    (r"could not convert string to float|invalid literal for int", "A number was expected: look at the value that the "
     "log quotes."),
    (r"RecursionError", "A recursion did not end: report it with a support bundle."),
    (r"module 'numpy' has no attribute|module 'torch' has no attribute", f"Packages do not fit together. {SET_UP}."),
    (r"bitsandbytes.*(?:CUDA Setup failed|was compiled without GPU support)|libbitsandbytes",
     "bitsandbytes does not work here. Use an optimizer without 8bit in its name, such as AdamW."),
    (r"Numpy is not available|_ARRAY_API not found|compiled using NumPy 1",
     f"Package versions that do not fit together are installed. {SET_UP}."),
    (r"No module named '([\w.]+)'", f"The Python package {{0}} is missing. {SET_UP}."),
    (r"cannot import name '(\w+)' from", "A package has another version than was tested ({0} is missing). "
     f"{SET_UP}."),
    (r"wandb.*(?:api_key not configured|No API key|login)|wandb: ERROR",
     "Weights & Biases wants a key: run wandb login, fill in wandb_api_key, or switch log_with off."),
    (r"unrecognized arguments: (\S+)|no such option: (\S+)", "{0} is no option of this script."),
    (r"KeyboardInterrupt", "It was stopped by a signal (Ctrl+C)."),
)  # fmt: skip

# What ends a process before Python can raise anything; it may stand anywhere in the log.
ENDINGS = (
    (r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly",
     "A process that reads images ended. Use fewer data loader workers (max_data_loader_n_workers 0 shows why)."),
    (r"SignalException: Process \d+ got signal: 15|Signals\.SIGTERM|exitcode: -15|got signal: 1\b",
     "It was ended by a closed terminal, a job system, or a computer that shut down."),
    (r"unable to (?:open|mmap|write) .*shared memory|Bus error|insufficient shared memory",
     "Shared memory ran out. Use fewer data loader workers; in a container, give it more (--shm-size 16g)."),
    (r"Signals\.SIGKILL|exitcode: -9|\(exitcode\s*:\s*-9\)|oom-kill|Out of memory: Killed process|^Killed$",
     "The system ended the training, most often because the computer ran out of memory (RAM)."),
    (r"Segmentation fault|SIGSEGV|exitcode: -11|access violation|0xC0000005",
     f"A library crashed. Update the driver and {SET_UP[0].lower()}{SET_UP[1:]}; kohya doctor says more."),
)  # fmt: skip
