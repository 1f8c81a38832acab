"""What `./setup.sh test --quick` leaves out: marks for what is slow by what it can use, and a table of what is slow
beside that. The rest takes at most 90 s on two cores and has tests of every room (`tests/test_quick.py`)."""

from typing import Any

# What makes a test slow, seen from what it can use: data sets and whole models, a browser, other processes.
MODELS = {"demo", "shallow", "trained", "made", "shapes", "squares", "bases", "lora_files"}
MODELS |= {"tiny_sdxl", "tiny_sdxl_folder"}
BROWSES = {"chromium"}
STARTS = ("subprocess", "train", "script", "run_it")  # names in the module of a test that starts processes or trainings

# By folder, files whose tests take 0.1 s of CPU time and more on average: they compute with networks, try every value
# or read the source of everything.
SLOW_FILES = {
    "": {
        "test_beside_rivals",
        "test_compatibility",
        "test_demo",
        "test_demo_learning",
        "test_figure",
        "test_golden",
        "test_plurals",
        "test_quality",
        "test_small_model",
        "test_versus",
        "test_words",
    },
    "bench": {"test_diffusers", "test_images_benchmark"},
    "config": {"test_foreign_recognised", "test_foreign_strange", "test_foreign_trainers"},
    "data": {"test_cached_variants", "test_held_out"},
    "families": {
        "test_chroma",
        "test_flux_2_model",
        "test_flux_3_model",
        "test_flux_family",
        "test_flux_files",
        "test_flux_variants",
        "test_krea_2_model",
        "test_qwen_edit_model",
        "test_qwen_image_21_model",
        "test_qwen_model",
        "test_sdxl_loading",
        "test_vae_memory",
        "test_zimage_model",
    },
    "memory": {"test_joint_layers", "test_padded_attention", "test_scaled"},
    "methods": {"test_assistant", "test_files", "test_lycoris", "test_same_input", "test_sample_lora"},
    "objectives": {"test_musubi_flow"},
    "page": {"test_damaged_records", "test_form", "test_lab", "test_labels", "test_texts"},
    "sampling": {"test_applied_files"},
    "tools": {"test_comfyui_names", "test_lycoris_files"},
    "train": {"test_fixes", "test_folders", "test_learning", "test_messages", "test_optim", "test_rounding"},
}
# Files of which some tests start processes or compile, and most do neither.
QUICK_FILES = {
    "captioning": {"test_captioning"},
    "comparing": {"test_comparing"},
    "compile": {"test_gpu_choices", "test_profiles", "test_savings"},
}


def mark_item(item: Any) -> None:
    """Mark a test `browser` or `slow` for what it uses or where it is."""
    used = set(getattr(item, "fixturenames", ()))
    folder = "" if item.path.parent.name == "tests" else item.path.parent.name
    if used & BROWSES:
        item.add_marker("browser")
    if used & MODELS or item.path.stem in SLOW_FILES.get(folder, ()):
        item.add_marker("slow")
    starts = folder == "compile" or any(hasattr(item.module, name) for name in STARTS)
    if starts and item.path.stem not in QUICK_FILES.get(folder, ()):
        item.add_marker("slow")
