"""Export a config to the JSON that kohya_ss's page loads."""

import math
from collections.abc import Mapping
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.config.reading import parse_resolution
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.config.sections import AdapterRun, EmbeddingRun
from library.config.values import join_words
from library.importers import kohya_adapters, kohya_launch, kohya_ss
from library.importers.builder import UNETS, Configs, settle_values
from library.importers.result import Imported
from library.importers.shared import load_tables

Fields = JsonObject

KOHYA_TABLES = load_tables("kohya_ss")
SAME_NAMED_FIELDS = frozenset(KOHYA_TABLES["fields"])  # options that are fields of the page under the same name
TYPED = frozenset(KOHYA_TABLES["flags"])  # flags without a field, for the box of additional parameters
NOISE_OPTIONS = (
    "noise_offset",
    "multires_noise_iterations",
    "noise_offset_random_strength",
    "adaptive_noise_scale",
    "multires_noise_discount",
)
# Options that share a group of fields: a change of one writes the whole group.
GROUPS = (
    ("network_module", "network_args"),
    (
        "learning_rate",
        "unet_lr",
        "text_encoder_lr",
        "network_train_unet_only",
        "network_train_text_encoder_only",
        "learning_rate_te1",
        "learning_rate_te2",
        "learning_rate_te",
        "train_text_encoder",
        "stop_text_encoder_training",
    ),
    ("lr_warmup_steps",),
    ("xformers", "sdpa"),
    ("optimizer_type", "use_8bit_adam", "use_lion_optimizer"),
    ("max_train_steps", "max_train_epochs"),
    NOISE_OPTIONS,
    ("train_data_dir", "in_json"),
    ("use_object_template", "use_style_template"),
)

EXPORTED_KINDS = ("lora", "finetune", "textual-inversion")
OF_WORDS = ("token_string", "init_word", "num_vectors_per_token", "weights")


def export(
    config: RunConfig,
    configs: Configs,
    base: JsonMapping | None = None,
    prompts: str = "",
    launch: JsonMapping | None = None,
) -> tuple[Fields, list[MessageLike]]:
    """Convert a config to the fields of kohya_ss's page, and a sentence for each option without an equivalent.

    With `base`, a file of kohya_ss for the same script, only fields of options that differ from it are written, and all
    its other keys stay. `prompts` is the text of the file that sample_prompts names, and `launch` the settings of the
    launcher; without `launch` their fields are those of the base.
    """
    if config.family not in KOHYA_TABLES["renamed"]:
        raise ConfigError("kohya_ss does not train {title}: there are no fields for it", title=config.title)
    if config.kind not in EXPORTED_KINDS:
        raise ConfigError(
            "{title} is not written for kohya_ss: save it as TOML, which sd-scripts reads too", title=config.title
        )
    tab = _export_tab(config, base)
    fields_by_option, lost = _export_fields(config, tab, prompts)
    set_options = set(option_values(config))
    typed = {
        name: v
        for name, v in flatten_sections(changed(config)).items()
        if name in _options_without_field(tab) and name not in fields_by_option
    }
    fields: Fields = dict(base or {})
    if base is None:
        fields |= _export_switches(config, tab)
    else:
        set_options = _changed_options(
            config, settle_values(kohya_ss.read_config(base, config.script), configs), prompts
        )
    for name in sorted(set_options & fields_by_option.keys()):
        fields |= fields_by_option[name]
    fields |= kohya_launch.launch_fields(launch, base or {}) if launch is not None else {}
    _write_typed_flags(fields, set_options, typed, config)
    return dict(sorted(fields.items())), lost


def _changed_options(config: RunConfig, before: Imported, prompts: str) -> set[str]:
    """Return the options that differ from those of the base, and all that share fields with them."""
    old, new = option_values(before.config), option_values(config)
    names = {name for name in new if old[name] != new[name]} - {"sample_prompts"}
    names |= {member for group in GROUPS for member in group if names & set(group)}
    return names | ({"sample_prompts"} if before.texts.get("sample_prompts", "").strip() != prompts.strip() else set())


def _export_tab(config: RunConfig, base: JsonMapping | None) -> str:
    if base is not None:
        tab = kohya_ss.tab_of(base)
        if _export_tab(config, None) != tab and {tab, config.kind} & {"lora", "textual-inversion"}:
            raise ConfigError(
                "the base is a file of the tab {titles}, which is not for {title}",
                titles=kohya_ss.TITLES[tab],
                title=config.title,
            )
        return tab
    if config.kind != "finetune":
        return config.kind
    if len(config.tabs) == 1:
        return config.tabs[0]
    return "finetune" if config.data.in_json or config.family == "anima" else "dreambooth"


def _export_switches(config: RunConfig, tab: str) -> Fields:
    sdxl = "sdxl_checkbox" if tab == "finetune" else "sdxl"
    if tab == "textual-inversion":
        return {"sdxl": config.family == "sdxl", "v2": False}
    off = dict.fromkeys([*kohya_ss.SWITCHES, "v2"], False)
    del off["sdxl" if tab == "finetune" else "sdxl_checkbox"]
    return off | {
        sdxl: config.family == "sdxl",
        "flux1_checkbox": config.family == "flux",
        "anima_checkbox": config.family == "anima",
    }


def _export_fields(config: RunConfig, tab: str, prompts: str) -> tuple[dict[str, Fields], list[MessageLike]]:
    """Return fields by option, and sentences about options that no field can express."""
    options, lost = options_of(type(config)), []
    keys = _field_names(config.family, tab)
    fields_by_option = {
        name: {keys[name]: _export_value(options[name], keys[name], v)}
        for name, v in option_values(config).items()
        if name in keys
    }
    groups = [
        _export_adapter(config, lost) if isinstance(config, AdapterRun) else {},
        _export_rates(config, tab),
        _export_warmup(config),
        {"xformers": "sdpa"},
        {"optimizer": config.optim.optimizer},
        {"max_train_steps": config.steps.max_train_steps, "max_train_epochs": config.steps.max_train_epochs or 0},
        _export_noise(config, fields_by_option) if tab == "lora" else {},
        _export_folders(config) if tab == "finetune" else {},
        _export_template(config) if isinstance(config, EmbeddingRun) else {},
    ]
    for members, fields in zip(GROUPS, groups, strict=True):
        for name in members:
            if fields and name in options:
                fields_by_option[name] = fields
    if isinstance(config, EmbeddingRun) and config.save.save_model_as != "safetensors":
        fields_by_option["save_model_as"] = {"save_model_as": "ckpt"}  # its name for pt
    if prompts:
        fields_by_option["sample_prompts"] = {"sample_prompts": prompts.rstrip("\n")}
    if len(config.data.sizes) > 1:
        template = "resolution: kohya_ss trains at one size, so only the largest of {sizes} is kept"
        lost.append(Message(template, sizes=config.data.resolution))
    unsupported = flatten_sections(changed(config)).keys() - fields_by_option.keys() - _options_without_field(tab)
    lost += [Message("{name} has no field in kohya_ss; it is left out", name=name) for name in sorted(unsupported)]
    return fields_by_option, lost


def _field_names(family: str, tab: str) -> dict[str, str]:
    """Return the page's field by option."""
    keys = {name: name for name in SAME_NAMED_FIELDS - _options_without_field(tab)}
    keys |= {name: name for name in OF_WORDS} if tab == "textual-inversion" else {}
    for key, option in (KOHYA_TABLES["renamed"]["any"] | KOHYA_TABLES["renamed"][family]).items():
        old = key == "lora_network_weights" or key.endswith("disable_mmap_load_safetensors")
        if not old and not (tab == "lora" and key in ("flux1_clip_l", "flux1_t5xxl")):
            keys[option] = key
    keys |= {"fused_backward_pass": "fused_backward_pass"} if family in UNETS else {"blocks_to_swap": "blocks_to_swap"}
    if tab == "lora":
        keys |= {"clip_l": "clip_l", "t5xxl": "t5xxl"}
    return keys


def _export_value(option: Any, key: str, value: Any) -> Any:
    if key == "max_resolution":
        width, height = max(parse_resolution(value or "512"), key=math.prod)
        return f"{width},{height}"
    if value is None and option.type in (int, float):
        return 75 if key == "max_token_length" else 0
    if key == "save_model_as" and value is None:
        return "same as source model"
    if key == "save_precision" and value is None:
        return "float"
    return value if isinstance(value, bool | int | float) else option.text(value)


def _export_adapter(config: AdapterRun, lost: list[MessageLike]) -> Fields:
    network = config.network
    arguments = dict(pair.split("=", 1) for pair in network.network_args if "=" in pair)
    fields, unmapped = kohya_adapters.adapter_fields(network.module, arguments)
    template = "{name} has no field in kohya_ss; it is left out"
    lost += [Message(template, name=f"network_args {pair}") for pair in unmapped]
    # Fields that are no longer set are written as empty, since the page would keep their previous values.
    nothing = dict.fromkeys(("conv_dim", "conv_alpha", *kohya_adapters.LORA_PLUS, *kohya_adapters.DROPOUTS), 0)
    return nothing | {"split_mode": False} | fields


def _export_rates(config: RunConfig, tab: str) -> Fields:
    optim, rate = config.optim, config.optim.learning_rate
    fields: Fields = {"learning_rate": rate}
    if isinstance(config, AdapterRun):
        optim = config.optim
        text = optim.text_encoder_lr or (rate,)
        unet = rate if optim.unet_lr is None else optim.unet_lr
        fields |= {"unet_lr": unet, "text_encoder_lr": text[0], "t5xxl_lr": text[1] if len(text) > 1 else 0}
        if config.network.network_train_unet_only:
            fields |= {"text_encoder_lr": 0, "t5xxl_lr": 0}
        elif config.network.network_train_text_encoder_only:
            fields |= {"unet_lr": 0}
    elif config.family in UNETS and config.kind == "finetune":
        learns = config.trains_whole_encoders
        encoder_rates = {name: getattr(optim, name) for name in config.encoder_rates.values()}
        fields |= {key: (rate if value is None else value) * learns for key, value in encoder_rates.items()}
        fields |= {"train_text_encoder": learns} if tab == "finetune" else {}
        if "stop_text_encoder_training" in option_values(config):
            fields |= {"stop_text_encoder_training": config.encoder_steps or 0}
    return fields


def _export_warmup(config: RunConfig) -> Fields:
    warmup = config.optim.lr_warmup_steps
    share = isinstance(warmup, float)
    return {"lr_warmup": round(warmup * 100, 6) if share else 0, "lr_warmup_steps": 0 if share else warmup}


def _export_noise(config: RunConfig, fields_by_option: Mapping[str, Fields]) -> Fields:
    noise = config.noise
    fields: Fields = {}
    for name in NOISE_OPTIONS:
        fields |= fields_by_option[name]
    return fields | {"noise_offset_type": "Multires" if noise.multires_noise_iterations else "Original"}


def _options_without_field(tab: str) -> frozenset[str]:
    return TYPED | frozenset(KOHYA_TABLES["no_field_of_textual_inversion"]) if tab == "textual-inversion" else TYPED


def _export_template(config: EmbeddingRun) -> Fields:
    chosen = (name for name, option in kohya_ss.TEMPLATES.items() if getattr(config.embedding, option))
    return {"template": next(chosen, "caption")}


def _export_folders(config: RunConfig) -> Fields:
    fields: Fields = {"image_folder": config.data.train_data_dir or ""}
    if path := config.data.in_json:
        at = max(path.rfind("/"), path.rfind("\\"))
        name = path[at + 1 :]
        fields |= {"train_dir": path[: max(at, 0)] or ".", "use_latent_files": "Yes", "latent_metadata_filename": name}
        fields |= {"create_caption": False, "create_buckets": False}  # or kohya_ss would write the file anew
    return fields


def _write_typed_flags(fields: Fields, names: set[str], typed: JsonMapping, config: RunConfig) -> None:
    """Write the box for additional parameters: drop its flags that changed, and add those without a field."""
    options = options_of(type(config))
    old_flags = kohya_ss.split_flags(str(fields.get("additional_parameters") or ""))
    unchanged = {name: items for name, items in old_flags.items() if name not in names}
    new_flags = {name: _flag_words(options[name], value) for name, value in typed.items() if name in names}
    if unchanged != old_flags or new_flags:
        tokens = [
            token for name, items in (unchanged | new_flags).items() for token in (*[f"--{name}"] * bool(name), *items)
        ]
        fields["additional_parameters"] = join_words(tokens)


def _flag_words(option: Any, value: Any) -> list[str]:
    if option.type is bool:
        return []
    return [str(item) for item in value] if option.many else [option.text(value)]
