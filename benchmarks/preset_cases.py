"""The cases of benchmarks/presets.py: every preset, and the settings that each is compared with."""

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from library.config.formats import read_toml

PROJECT_ROOT = Path(__file__).resolve().parents[1]
PRESET_KINDS = ("lora", "finetune", "textual-inversion", "lllite")
PROFILED = {"sdxl": "lora-12gb", "flux": "lora-24gb"}  # the presets that are combined with compile profiles
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
LEAST: dict[str, int] = TABLES["least"]
LARGEST_MEMORY = max(LEAST.values())


# Why: docs/decisions/2026-11-22-presets-promise-memory.md
# Why: docs/decisions/2026-11-22-adapters-are-stepped-by-adamw.md
# Why: docs/decisions/2026-11-22-cuda-graphs-in-presets.md
# Why: docs/decisions/2026-11-22-no-t5-attention-mask.md
# Why: docs/decisions/2026-11-22-swapped-blocks-in-presets.md
@dataclass(frozen=True)
class PresetCase:
    """One measurement."""

    family: str
    kind: str  # one of KINDS
    name: str
    values: dict[str, Any]
    cap: float | None = None  # GPU memory in GiB that a preset promises to suffice
    room: int = 16  # GiB for compiling it beside the others
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
        """Return the key of a case's graphs: cases with equal keys share them."""
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
    """Return the preset folder of a family or a relative."""
    from library.families import owner

    return owner(family)


def known_models() -> list[str]:
    """Return the families, and the relatives with presets of their own."""
    from library import families

    return [name for family in families.all_families() for name in (family.name, *family.demo_variants)]


def preset_cases(family: str, only: list[str] | None, size: str) -> list[PresetCase]:
    """Return the presets of a family or a relative, and the cases that each is compared with."""
    cases: list[PresetCase] = []
    relative = "" if preset_folder(family) == family else f"-{family.removeprefix(preset_folder(family)).lstrip('_')}"
    for kind in PRESET_KINDS:
        for path in sorted((PROJECT_ROOT / "presets" / preset_folder(family)).glob(f"{kind}{relative}-[0-9]*gb.toml")):
            if not only or path.stem in only:
                cap = float(path.stem.rpartition("-")[2].removesuffix("gb"))
                room = int(min(max(cap, LEAST.get(family, LARGEST_MEMORY)), 64))
                cases.append(PresetCase(family, kind, path.stem, read_toml(path), cap, room, size))
    names = {case.name for case in cases}
    for kind in PRESET_KINDS:
        for way in TABLES["ways"].get(f"{family} {kind}", ()):
            if way["preset"] in names:
                values = read_toml(PROJECT_ROOT / "presets" / preset_folder(family) / f"{way['preset']}.toml")
                for change in way.get("changes", ()):
                    values |= TABLES["changes"][change]
                values |= way.get("options", {})
                values = {option: value for option, value in values.items() if value != ""}
                room = max(way["gib"], LEAST.get(family, LARGEST_MEMORY))
                cases.append(PresetCase(family, kind, way["name"], values, room=room, size=size))
    return cases + (profiled(family, size) if PROFILED.get(family) in names else [])


def profiled(family: str, size: str) -> list[PresetCase]:
    """Yield a preset combined with each compile profile, as the page does it, except the one that decides during a
    training."""
    from kohya_gui.form import presets
    from library import families
    from library.config.building import build_config
    from library.config.schema import changed, option_values
    from library.config.schema import flatten_sections as without_tables
    from library.recipes import preset_files

    cases, base = [], PROFILED[family]
    config = families.config_class(families.lora_script(family))
    now = option_values(build_config(config, read_toml(PROJECT_ROOT / "presets" / family / f"{base}.toml"), notes=[]))
    for profile in preset_files.profiles():
        if profile.is_profile and not (applied := presets.apply(profile, config, now)).compile.compile_autotune:
            tables = without_tables(changed(applied))
            cases.append(PresetCase(family, "lora", f"{base} by {profile.path.stem}", tables, None, 24, size))
    return cases


def choose_case(cases: list[PresetCase], title_and_values: str) -> PresetCase:
    """Return the case of a title; values after it, as in TOML, override its own, and `memory`, in GiB, its limit."""
    title, *changes = re.split(r" (?=\w+=)", title_and_values)
    case = next((case for case in cases if case.title == title), None)
    if case is None:
        raise ValueError(f"--cases: {title!r} is neither a preset nor a compared setting of the chosen families")
    if not changes:
        return case
    values = case.values | tomllib.loads("\n".join(changes))
    return replace(case, name=" ".join([case.name, *changes]), cap=values.pop("memory", case.cap), values=values)
