"""Choices of options in words, where the value itself reads badly; `words` of an option come before these."""

import re
from collections.abc import Mapping
from types import MappingProxyType

CHOICE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "true": "On",
        "false": "Off",
        "gpu": "GPU",
        "cpu": "CPU",
        "cuda": "CUDA",
        # number formats and files
        "no": "fp32",
        "float": "fp32",
        "safetensors": ".safetensors",
        "ckpt": ".ckpt",
        "pt": ".pt",
        "comfy": "ComfyUI",
        # samplers
        "ddim": "DDIM",
        "pndm": "PNDM",
        "lms": "LMS",
        "dpm_2": "DPM2",
        "dpm_2_a": "DPM2 a",
        "dpmsolver": "DPM-Solver",
        "dpmsolver++": "DPM-Solver++",
        "dpmsingle": "DPM-Solver singlestep",
        "k_lms": "LMS (k-diffusion)",
        "k_euler": "Euler (k-diffusion)",
        "k_euler_a": "Euler a (k-diffusion)",
        "k_dpm_2": "DPM2 (k-diffusion)",
        "k_dpm_2_a": "DPM2 a (k-diffusion)",
        "lcm": "LCM",
        # schedules and losses
        "constant_with_warmup": "Constant with warm-up",
        "cosine_with_min_lr": "Cosine with minimum rate",
        "inverse_sqrt": "Inverse square root",
        "warmup_stable_decay": "Warm-up, stable, decay",
        "l1": "L1",
        "l2": "L2",
        "smooth_l1": "Smooth L1",
        "snr": "SNR",
        "sigma_sqrt": "Square root of sigma",
        "logit_normal": "Logit-normal",
        "cosmap": "CosMap",
        # attention and torch.compile
        "cudnn": "cuDNN",
        "sage": "SageAttention",
        "flash3": "Flash 3",
        "flash4": "Flash 4",
        "cudagraphs": "CUDA graphs",
        "aot_eager": "AOT eager",
        "max-autotune-no-cudagraphs": "Max autotune without CUDA graphs",
        # resizing of LoRA files
        "sv_ratio": "Ratio of singular values",
        "sv_fro": "Share of the norm",
        "sv_cumulative": "Share of singular values",
        # logs
        "tensorboard": "TensorBoard",
        "wandb": "W&B",
        "DEBUG": "Debug",
        "INFO": "Info",
        "WARNING": "Warning",
        "ERROR": "Error",
        "CRITICAL": "Critical",
    }
)


def word_of_choice(text: str, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a choice in words; `own` are those of its option."""
    if word := own.get(text, CHOICE_WORDS.get(text)):
        return word
    is_name = not text.islower() or "." in text or any(letter.isdigit() for letter in text)  # AdamW8bit, bf16
    return text if is_name else re.sub("[_-]", " ", text).capitalize()
