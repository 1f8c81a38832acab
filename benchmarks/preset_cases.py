"""What benchmarks/presets.py measures: every preset, and the ways to train that each is compared with."""

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PROJECT_ROOT = Path(__file__).resolve().parents[1]
PRESET_KINDS = ("lora", "finetune", "textual-inversion", "lllite")
PROFILED = {"sdxl": "lora-12gb", "flux": "lora-24gb"}  # the presets over which the compile profiles are laid
# GiB of a model in 16 bits with one pass; of one that is not named here, most of a GPU
LEAST = {
    "sdxl": 10,
    "flux": 28,
    "chroma": 22,
    "kontext": 30,
    "fill": 28,
    "qwen_image": 48,
    "qwen_image_edit": 50,
    "zimage": 18,
    "flux_2": 14,
    "anima": 10,
}
LARGEST_MEMORY = max(LEAST.values())
CKPT = {"gradient_checkpointing": True}
EAGER = {"compile": False, "compile_mode": "default", "cuda_graphs": "false"}
WITHOUT_SAVING = {"blocks_to_swap": None, "checkpoint_keep_attention": False}
UNRECORDED = {"compile_mode": "default", "cuda_graphs": "false"}
RECORDED = {"compile": True, "compile_mode": "reduce-overhead", "cuda_graphs": "auto"}
FP8_CHANGES = {"fp8_base": True, "fp8_compute": True}
INT8 = {"int8_base": True, "int8_compute": True}
BF16 = {"fp8_base": False, "fp8_compute": False}
# What a preset is compared with: a name, what changes, and the GiB that it needs, roughly, to compile side by side.
COMPARED_WAYS: dict[str, tuple[tuple[str, str, dict[str, Any], int], ...]] = {
    "sdxl lora": (
        ("eager, checkpointing", "lora-12gb", EAGER, 9),
        ("eager, checkpointing, recorded", "lora-12gb", {**EAGER, "cuda_graphs": "true"}, 10),
        ("eager, recorded", "lora-24gb", {**EAGER, "cuda_graphs": "true"}, 16),
        ("compiled, checkpointing, fp8 base", "lora-8gb", UNRECORDED, 10),
        ("recorded, checkpointing, AdamW8bit", "lora-12gb", {"optimizer_type": "AdamW8bit"}, 10),
        ("recorded, batch 2", "lora-24gb", {"train_batch_size": 2}, 24),
        ("recorded, checkpointing, batch 4", "lora-12gb", {"train_batch_size": 4}, 16),
        ("recorded, keeps attention", "lora-12gb", {"checkpoint_keep_attention": True}, 14),
        ("recorded, half the activations", "lora-24gb", {"compile_activation_budget": 0.5}, 16),
        ("recorded, transformer blocks only", "lora-24gb", {"compile_blocks": "transformer:all"}, 20),
        ("recorded, fp8 base", "lora-24gb", {"fp8_base": True}, 16),
        ("compiled, not recorded", "lora-24gb", UNRECORDED, 14),
    ),
    "sdxl finetune": (
        ("recorded", "finetune-24gb", {"gradient_checkpointing": False}, 26),
        ("eager, checkpointing", "finetune-16gb", {**EAGER, **CKPT}, 12),
        ("checkpointing", "finetune-16gb", CKPT, 14),
    ),
    "flux lora": (
        ("eager, checkpointing", "lora-80gb", {**EAGER, **CKPT}, 28),
        ("fp8 products, checkpointing", "lora-24gb", {"checkpoint_keep_attention": False}, 17),
        (
            "fp8 products, half the activations",
            "lora-24gb",
            {"checkpoint_keep_attention": False, "gradient_checkpointing": False, "compile_activation_budget": 0.5},
            34,
        ),
        ("int8 products", "lora-80gb", INT8, 46),
        ("fp8 products, recorded", "lora-48gb", RECORDED, 60),
        ("fp8 products, 22 blocks swapped", "lora-12gb", {"blocks_to_swap": 22}, 17),
        ("fp8 products, 10 blocks swapped", "lora-16gb", {"blocks_to_swap": 10}, 17),
        (
            "fp8 products, 14 blocks swapped, keeps attention",
            "lora-16gb",
            {"checkpoint_keep_attention": True, "blocks_to_swap": 14},
            18,
        ),
        (
            "bf16, 12 blocks swapped",
            "lora-24gb",
            {"fp8_base": False, "fp8_compute": False, "blocks_to_swap": 12, "checkpoint_keep_attention": False},
            28,
        ),
    ),
    "flux finetune": (
        ("checkpointing", "finetune-80gb", CKPT, 34),
        ("10 blocks swapped", "finetune-24gb", {"blocks_to_swap": 10}, 34),
    ),
    "chroma lora": (
        ("eager, checkpointing", "lora-chroma-48gb", {**EAGER, **CKPT, **BF16}, 22),
        ("fp8 products, checkpointing", "lora-chroma-24gb", WITHOUT_SAVING, 14),
        ("no checkpointing", "lora-chroma-48gb", BF16, 48),
        ("fp8 products, recorded", "lora-chroma-48gb", RECORDED, 60),
    ),
    "kontext lora": (
        ("eager, checkpointing", "lora-kontext-24gb", {**EAGER, **BF16}, 32),
        ("fp8 products, keeps attention", "lora-kontext-24gb", {"checkpoint_keep_attention": True}, 24),
        (
            "fp8 products, half the activations",
            "lora-kontext-24gb",
            {"gradient_checkpointing": False, "compile_activation_budget": 0.5},
            50,
        ),
        ("fp8 products", "lora-kontext-24gb", {"gradient_checkpointing": False}, 76),
    ),
    "fill lora": (("fp8 products, recorded", "lora-fill-48gb", RECORDED, 60),),
    "qwen_image lora": (
        ("eager, checkpointing", "lora-80gb", {**EAGER, **CKPT, **BF16}, 46),
        ("checkpointing", "lora-80gb", {**CKPT, **BF16}, 46),
        ("fp8 products, checkpointing", "lora-80gb", CKPT, 26),
        ("fp8 products, half the activations", "lora-80gb", {"compile_activation_budget": 0.5}, 52),
        ("fp8 products, keeps attention, recorded", "lora-32gb", RECORDED, 40),
        ("fp8 products, 12 blocks swapped", "lora-24gb", {"blocks_to_swap": 12}, 26),
    ),
    "flux_2 lora": (
        ("eager, checkpointing", "lora-12gb", {**EAGER, **CKPT, **WITHOUT_SAVING, **BF16}, 14),
        ("keeps attention", "lora-12gb", BF16, 14),
        ("no checkpointing", "lora-24gb", BF16, 32),
        ("fp8 products, keeps attention, recorded", "lora-12gb", RECORDED, 14),
        ("fp8 products, half the activations", "lora-24gb", {"compile_activation_budget": 0.5}, 20),
    ),
    "anima lora": (
        ("eager, checkpointing", "lora-12gb", {**EAGER, **CKPT, **WITHOUT_SAVING}, 10),
        ("recorded", "lora-24gb", RECORDED, 20),
        ("fp8 products", "lora-24gb", FP8_CHANGES, 16),
    ),
    "qwen_image_edit lora": (("fp8 products, 18 blocks swapped", "lora-edit-24gb", {"blocks_to_swap": 18}, 50),),
    "zimage lora": (
        ("eager, checkpointing", "lora-16gb", {**EAGER, **CKPT, **WITHOUT_SAVING, **BF16}, 18),
        ("keeps attention", "lora-16gb", BF16, 18),
        ("no checkpointing", "lora-32gb", BF16, 38),
        ("fp8 products, keeps attention, recorded", "lora-16gb", RECORDED, 18),
    ),
}


# Why: docs/decisions/2026-11-22-presets-promise-memory.md
# Why: docs/decisions/2026-11-22-adapters-are-stepped-by-adamw.md
# Why: docs/decisions/2026-11-22-cuda-graphs-in-presets.md
# Why: docs/decisions/2026-11-22-no-t5-attention-mask.md
# Why: docs/decisions/2026-11-22-swapped-blocks-in-presets.md
@dataclass(frozen=True)
class PresetCase:
    """One thing to measure."""

    family: str
    kind: str  # one of KINDS
    name: str
    values: dict[str, Any]
    cap: float | None = None  # GiB of the GPU that a preset promises to be enough
    room: int = 16  # GiB that compiling it may take beside the others
    size: str = "full"
    warm: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> str:
        from library import families

        scripts = families.facts_of(preset_folder(self.family)).scripts
        return next(script for script in scripts if families.config_class(script).kind == self.kind)

    @property
    def title(self) -> str:
        return f"{self.family} {self.name}" if self.cap else f"{self.family} {self.kind}, {self.name}"

    @property
    def graphs(self) -> str:
        """What decides which graphs are made: cases that are equal here share them."""
        names = (
            "gradient_checkpointing",
            "checkpoint_keep_attention",
            "fp8_base",
            "fp8_compute",
            "int8_base",
            "int8_compute",
            "train_batch_size",
            "compile_activation_budget",
            "compile_blocks",
            "compile_backend",
            "cpu_offload_checkpointing",
            "network_dim",
            "model_type",
        )
        return f"{self.script} {[(name, self.values.get(name)) for name in names]}"


def preset_folder(family: str) -> str:
    """The folder of presets of a family or a relative."""
    from library.families import owner

    return owner(family)


def known_models() -> list[str]:
    """Families, and the relatives whose presets have their names."""
    from library import families

    return [name for family in families.all_families() for name in (family.name, *family.demo_variants)]


def preset_cases(family: str, only: list[str] | None, size: str) -> list[PresetCase]:
    """The presets of a family or a relative, and what each is compared with."""
    cases: list[PresetCase] = []
    relative = "" if preset_folder(family) == family else f"-{family.removeprefix(preset_folder(family)).lstrip('_')}"
    for kind in PRESET_KINDS:
        for path in sorted((PROJECT_ROOT / "presets" / preset_folder(family)).glob(f"{kind}{relative}-[0-9]*gb.toml")):
            if not only or path.stem in only:
                cap = float(path.stem.rpartition("-")[2].removesuffix("gb"))
                room = int(min(max(cap, LEAST.get(family, LARGEST_MEMORY)), 64))
                cases.append(PresetCase(family, kind, path.stem, flat_options(path), cap, room, size))
    known = {case.name for case in cases}
    for kind in PRESET_KINDS:
        for name, base, changes, room in COMPARED_WAYS.get(f"{family} {kind}", ()):
            if base in known:
                values = {**flat_options(PROJECT_ROOT / "presets" / preset_folder(family) / f"{base}.toml"), **changes}
                values = {option: value for option, value in values.items() if value is not None}
                cases.append(
                    PresetCase(family, kind, name, values, None, max(room, LEAST.get(family, LARGEST_MEMORY)), size)
                )
    return cases + (profiled(family, size) if PROFILED.get(family) in known else [])


def profiled(family: str, size: str) -> list[PresetCase]:
    """The compile profiles, laid over a preset as the page does it; but for the one that decides within a training."""
    from kohya_gui.form import presets
    from library import families
    from library.config.building import build_config
    from library.config.schema import changed, option_values
    from library.config.schema import flatten_sections as without_tables
    from library.recipes import preset_files

    found, base = [], PROFILED[family]
    config = families.config_class(f"{family}_train_network")
    now = option_values(
        build_config(config, flat_options(PROJECT_ROOT / "presets" / family / f"{base}.toml"), notes=[])
    )
    for profile in preset_files.profiles():
        if profile.is_profile and not (made := presets.apply(profile, config, now)).compile.compile_autotune:
            tables = without_tables(changed(made))
            found.append(PresetCase(family, "lora", f"{base} by {profile.path.stem}", tables, None, 24, size))
    return found


def choose_case(every: list[PresetCase], wanted: str) -> PresetCase:
    """The case of a title; values behind it, as in a TOML file, replace its own, and `memory`, in GiB, its limit."""
    title, *changes = re.split(r" (?=\w+=)", wanted)
    case = next((case for case in every if case.title == title), None)
    if case is None:
        raise ValueError(f"--cases: {title!r} is not a preset of the chosen families, nor a way to train them")
    if not changes:
        return case
    values = case.values | tomllib.loads("\n".join(changes))
    return replace(case, name=" ".join([case.name, *changes]), cap=values.pop("memory", case.cap), values=values)


def flat_options(path: Path) -> dict[str, Any]:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: value for table in tables.values() for name, value in table.items()}
