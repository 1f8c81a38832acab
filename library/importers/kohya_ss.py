"""Import kohya_ss's JSON files: LoRA, DreamBooth, Finetune, Textual Inversion; also of forks with compile keys."""

from collections.abc import Callable

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, option_name
from library.config.values import split_words
from library.families import facts_of
from library.importers import flat, kohya_adapters, kohya_folders, kohya_launch, kohya_learning
from library.importers.builder import UNETS, ImportBuilder, family_of_script, is_empty, is_on, to_number
from library.importers.command_line import flag_value, flags_of
from library.importers.shared import chooses_chroma, load_tables, other_model_error, say_nearest
from library.importers.typed_arguments import add_argument, argument_of

TRAINER = "kohya_ss"
APPLIES_EXIF = False  # as sd-scripts
KOHYA_TABLES = load_tables("kohya_ss")
TITLES = {"lora": "LoRA", "dreambooth": "DreamBooth", "finetune": "Finetune", "textual-inversion": "Textual Inversion"}
SD15_SCRIPTS = {
    "lora": "train_network",
    "dreambooth": "train_db",
    "finetune": "fine_tune",
    "textual-inversion": "train_textual_inversion",
}
SCRIPT_ENDINGS = {"lora": "train_network", "textual-inversion": "train_textual_inversion"}  # others end in "train"
DROPS_ZEROS = ("lora", "textual-inversion")
TEMPLATES = {"object template": "use_object_template", "style template": "use_style_template"}
FAMILY_SWITCHES = {
    "sdxl": "sdxl",
    "sdxl_checkbox": "sdxl",
    "flux1_checkbox": "flux",
    "sd3_checkbox": "SD3",
    "anima_checkbox": "anima",
}
TRAINED = ("sd15", "sdxl", "flux", "anima")
OTHER_SWITCHES = {"hunyuan_image_checkbox": "HunyuanImage", "lumina_checkbox": "Lumina"}
SWITCHES = {**FAMILY_SWITCHES, **OTHER_SWITCHES}
OF_OTHER_TABS = {key for tab in KOHYA_TABLES["other_tabs"] for key in tab["keys"]}
TELLING = {*SWITCHES, "LoRA_type", "max_resolution", "save_as_bool", "model_list", "optimizer"}


def recognises(settings: JsonMapping) -> bool:
    """Return whether this is a file of kohya_ss."""
    own_keys = TELLING & settings.keys()
    shared_keys = OF_OTHER_TABS & settings.keys()  # scripts have these as flags, too, so they do not suffice alone
    return len(own_keys) >= 2 or bool(own_keys and shared_keys) or bool({"LoRA_type", *SWITCHES} & settings.keys())


def tab_of(settings: JsonMapping) -> str:
    """Return the tab that wrote a file, inferred from its keys: a key of TITLES.

    Raises ConfigError for files of tabs that do not train.
    """
    for other in KOHYA_TABLES["other_tabs"]:
        if settings.keys() & set(other["keys"]):
            raise other_model_error(TRAINER, other["title"])
    if settings.keys() & set(KOHYA_TABLES["only_textual_inversion"]):
        return "textual-inversion"
    if {"LoRA_type", "network_dim", "unet_lr"} & settings.keys():
        return "lora"
    if {"image_folder", "train_dir"} & settings.keys():
        return "finetune"
    finetune, dreambooth = (
        len(settings.keys() & set(KOHYA_TABLES[keys])) for keys in ("only_finetune", "only_dreambooth")
    )
    return "finetune" if finetune > dreambooth else "dreambooth"


def tab_title(settings: JsonMapping) -> str:
    return TITLES[tab_of(settings)]


def script_of_kohya_file(settings: JsonMapping) -> str:
    """Return the script that a file is for. Raises ConfigError for unsupported models."""
    tab = tab_of(settings)
    # If several boxes are ticked, kohya_ss takes the first in this order.
    order = ["sdxl", "flux", "SD3"] if tab == "lora" else ["sdxl", "SD3", "flux"]
    order.append("anima")
    models = {model for switch, model in SWITCHES.items() if is_on(settings.get(switch))}
    models &= {"sdxl"} if tab == "textual-inversion" else models  # that tab has no other switches
    family = next((model for model in [*order, *OTHER_SWITCHES.values()] if model in models), "")
    if not family and str(settings.get("LoRA_type", "")).startswith("Flux1"):
        family = "flux"
    if not family and not is_on(settings.get("v2")):
        return SD15_SCRIPTS[tab]  # the model of kohya_ss if no box is ticked
    if family not in TRAINED:
        raise ConfigError(
            "this file of {trainer} is for {title}, which is not trained here: use {trainer}, or take its settings "
            "over for another model with kohya import --script, such as --script sdxl_train_network",
            trainer=TRAINER,
            title=family or "Stable Diffusion 2",
        )
    return f"{family}_{SCRIPT_ENDINGS.get(tab, 'train')}"


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Convert every key of a file to our values and an outcome. `script` overrides the one that the file is for.

    Missing keys have the initial values of kohya_ss's page, as when that page loads the file.
    """
    tab = tab_of(settings)
    script = script or script_of_kohya_file(settings)
    starts = page_defaults(tab, family_of_script(script), settings)
    filled = {key: starts[key] if value is None and key in starts else value for key, value in settings.items()}
    builder = ImportBuilder(
        {**starts, **filled}, script, f"{TRAINER} ({TITLES[tab]})", absent=frozenset(starts - settings.keys())
    )
    for part in TAB_IMPORTS:
        part(builder, tab)
    for key in builder.left():
        if key != "additional_parameters":
            _import_key(builder, key, tab)
    if str(settings.get("model_type") or "").casefold() == "chroma" and builder.family == "flux":
        chooses_chroma(builder, "model_type")
        builder.explain("is set by model_type", "apply_t5_attn_mask", "guidance_scale")
        if builder.values.pop("clip_l", None):
            builder.ignore("clip_l", "there is no CLIP-L in Chroma")
    read_typed_flags(builder)
    return builder


def page_defaults(tab: str, family: str, settings: JsonMapping) -> JsonObject:
    """Return the initial values of a tab of kohya_ss's page, for keys that a file does not have."""
    values = KOHYA_TABLES["starts"]["any"] | KOHYA_TABLES["starts"][tab]
    if family not in UNETS:
        values.pop("train_text_encoder", None)
    elif tab == "dreambooth":  # older files without these fields have one rate for all parts
        names = ("learning_rate_te",) if family == "sd15" else ("learning_rate_te1", "learning_rate_te2")
        values |= dict.fromkeys(names, settings.get("learning_rate") or 1e-5)
    if "optimizer" not in settings:  # older files have a switch instead, which sets the optimizer
        values["optimizer"] = None if "use_8bit_adam" in settings else "AdamW"
    if "max_train_steps" not in settings and "epoch" not in settings and "max_train_epochs" not in settings:
        values["max_train_steps"] = 1600
    return {key: value for key, value in values.items() if settings.get(key) is None and value is not None}


# ---- keys that are not simply an option


def _import_kohya_switches(builder: ImportBuilder, tab: str) -> None:
    for key in SWITCHES.keys() & builder.source.keys():
        is_chosen = is_on(builder.get(key)) and SWITCHES[key] == builder.family
        if is_chosen:
            builder.chooses_script(key)
        elif is_on(builder.get(key)):
            builder.ignore(key, Message("the script is {script}", script=builder.script))
        else:
            builder.empty(key)


def _import_old_names(builder: ImportBuilder, tab: str) -> None:
    old = builder.source.get("use_8bit_adam")
    if "use_8bit_adam" in builder.source:
        if builder.get("optimizer"):
            builder.ignore("use_8bit_adam", "optimizer is set and takes precedence")
        elif is_on(old):
            builder.change("use_8bit_adam", "becomes optimizer_type = AdamW8bit", {"optimizer_type": "AdamW8bit"})
    if "use_wandb" in builder.source:  # kohya_ss enables it for this value only
        if builder.source["use_wandb"] == "True":
            builder.change("use_wandb", "becomes log_with = wandb", {"log_with": "wandb"})
        else:
            builder.empty("use_wandb")
    for key in ("optimizer_args", "lr_scheduler_args"):
        value = builder.get(key)
        if isinstance(value, str):
            builder.keep(key, value.replace('"', "").split())


def _import_kohya_attention(builder: ImportBuilder, tab: str) -> None:
    value = str(builder.get("xformers") or "none").casefold()
    if "xformers" in builder.source and value in ("xformers", "true", "1"):
        builder.change("xformers", "PyTorch's own attention (sdpa) is as fast and needs no package", {"sdpa": True})
    elif value == "sdpa":
        builder.change("xformers", "sdpa is used instead", {"sdpa": True})
    builder.empty("xformers")


def _import_kohya_precision(builder: ImportBuilder, tab: str) -> None:
    if str(builder.get("mixed_precision")).casefold() == "fp8":
        text = "fp8 is not offered for computing; bf16 is used, and fp8_base saves memory"
        builder.change("mixed_precision", text, {"mixed_precision": "bf16"})


def _import_saved_format(builder: ImportBuilder, tab: str) -> None:
    """Import the format of the saved file, and the prompts, which are text on kohya_ss's page and a file here."""
    kind = str(builder.get("save_model_as") or "")
    if kind == "same as source model":
        builder.empty("save_model_as")
    elif tab in DROPS_ZEROS and kind and kind not in ("safetensors", "ckpt", "pt"):
        builder.change("save_model_as", say_nearest(kind, "safetensors"), {"save_model_as": "safetensors"})
    prompts = builder.get("sample_prompts")
    if not isinstance(prompts, str):
        return
    if "\n" not in prompts.strip() and prompts.strip().lower().endswith((".txt", ".toml", ".json")):
        builder.keep("sample_prompts", prompts.strip())
    else:
        builder.texts["sample_prompts"] = prompts.strip() + "\n"
        builder.change("sample_prompts", "these are the prompts themselves; here sample_prompts names a file with them")


def _import_template(builder: ImportBuilder, tab: str) -> None:
    """Import the template that replaces captions."""
    if tab == "textual-inversion" and (option := TEMPLATES.get(str(builder.get("template")))):
        builder.change("template", Message("is {option} here", option=option_name(option)), {option: True})
    builder.empty("template")


def _import_kohya_adapter(builder: ImportBuilder, tab: str) -> None:
    if tab == "lora":
        kohya_adapters.read_lora_type(builder)
    if "split_mode" in builder.left():
        builder.ignore("split_mode", "set blocks_to_swap instead; kohya_ss never passes it on")
    if builder.family == "flux":
        is_set = bool(builder.number("blocks_to_swap")) or "blocks_to_swap" in builder.values
        flat.convert_old_blocks(builder, ("double_blocks_to_swap", "single_blocks_to_swap"), is_set)


TAB_IMPORTS: tuple[Callable[[ImportBuilder, str], None], ...] = (
    _import_kohya_switches,
    kohya_learning.read_length,
    kohya_learning.read_warmup,
    kohya_learning.read_rates,
    kohya_learning.read_encoder_end,
    _import_old_names,
    _import_kohya_attention,
    kohya_learning.read_noise,
    _import_kohya_precision,
    _import_saved_format,
    kohya_folders.read_folders,
    _import_template,
    _import_kohya_adapter,
    kohya_launch.record_launch_keys,
)


# ---- all other keys


def _import_key(builder: ImportBuilder, key: str, tab: str) -> None:
    """Import a key that is an option, possibly under another name, or has no equivalent."""
    value = builder.source[key]
    renamed = KOHYA_TABLES["renamed"][builder.family].get(key) or KOHYA_TABLES["renamed"]["any"].get(key)
    # Older versions of the page wrote False for empty fields of these.
    empty = is_empty(value) or value == "False" and key.startswith(("huggingface_", "metadata_", "resume_from_"))
    if empty or (key in KOHYA_TABLES["zero_is_unset"] and to_number(value) == 0):
        builder.empty(key)
    elif reason := _why_meaningless(builder, key, tab):
        builder.ignore(key, reason)
    elif renamed and renamed in builder.values and not is_on(value):
        builder.empty(key)
    elif renamed:
        builder.rename(key, renamed)
    elif tab in DROPS_ZEROS and key in KOHYA_TABLES["zero_was_dropped"] and to_number(value) == 0:
        builder.change(
            key, "0 is kept as written; kohya_ss drops it and trains with the script's default", {key: value}
        )
    elif key == "persistent_data_loader_workers":
        builder.keep(key, is_on(value))
    else:
        builder.keep(key)


def _why_meaningless(builder: ImportBuilder, key: str, tab: str) -> MessageLike:
    """Return why a key has no meaning in this file, or ""."""
    other = next((why for start, why in KOHYA_TABLES["other_models"].items() if key.startswith(start)), "")
    sd3 = "" if tab == "lora" else KOHYA_TABLES["sd3_in_full"].get(key, "")
    if builder.script == "train_db" and key == "no_token_padding":
        return ""  # the script has its own reason
    if reason := KOHYA_TABLES["ignored"].get(key) or sd3 or other:
        return reason
    if builder.family not in ("flux", "anima") and key in ("blocks_to_swap", "flux_fused_backward_pass"):
        return "kohya_ss has it for FLUX.1 only"
    if tab == "textual-inversion" and key in KOHYA_TABLES["never_for_textual_inversion"]:
        return "kohya_ss never passes it on in this tab"
    if builder.family == "flux" and key in KOHYA_TABLES["never_for_flux"]:
        return "in kohya_ss it is a setting for other models, which a FLUX.1 script never gets"
    prefixes = {"sdxl_": "sdxl", "flux1_": "flux", "anima_": "anima"}
    owner = next((family for start, family in prefixes.items() if key.startswith(start)), builder.family)
    return "" if owner == builder.family else Message("it is for {title}", title=facts_of(owner).title)


def read_typed_flags(builder: ImportBuilder) -> None:
    """Read the flags in the box, which take precedence over all fields."""
    text = builder.get("additional_parameters")
    if not isinstance(text, str):
        builder.empty("additional_parameters")
        return
    typed = split_flags(text)
    stray_words = typed.pop("", [])
    if "torch_compile" in typed:
        typed.pop("torch_compile")
        backend = builder.get("dynamo_backend")
        typed["compile"] = []
        if backend and str(backend).casefold() != "no":
            typed.setdefault("compile_backend", [str(backend)])
    values = {name: flag_value(items) for name, items in typed.items()}
    if not values:
        builder.ignore("additional_parameters", "there is no --flag in it")
        return
    if stray_words:
        name = f"additional_parameters {' '.join(stray_words)}"
        builder.source = {**builder.source, name: stray_words}
        builder.ignore(name, "there is no --flag in it")
    explanation = Message("its flags stand by themselves: {flags}", flags=", ".join(values))
    builder.change("additional_parameters", explanation)
    for name, value in values.items():
        # Each flag has an outcome of its own, so that unknown ones are reported by name.
        builder.source = {**builder.source, f"additional_parameters --{name}": value}
        if not (option := argument_of(name, builder.script)):
            builder.rename(f"additional_parameters --{name}", name, value)
    for name, value in values.items():  # after flags that replace all arguments
        if option := argument_of(name, builder.script):
            add_argument(builder, f"additional_parameters --{name}", option, name, value)


def split_flags(text: str) -> dict[str, list[str]]:
    """Split `--seed 5 --network_args a=1 b=2` into flags with their values; under "" what precedes the first flag."""
    return flags_of(split_words(text))
