"""Import kohya_ss's JSON files: LoRA, DreamBooth, Finetune, Textual Inversion; also of forks with compile keys."""

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, option_name, option_values
from library.importers import flat, kohya_adapters, kohya_flags, kohya_launch
from library.importers.builder import ImportBuilder, is_empty, is_on, to_number
from library.importers.shared import ONLY, chooses_chroma, load_tables, said_of, say_nearest, set_by

TRAINER = "kohya_ss"
APPLIES_EXIF = False  # as sd-scripts
KOHYA_TABLES = load_tables("kohya_ss")
TITLES = {"lora": "LoRA", "dreambooth": "DreamBooth", "finetune": "Finetune", "textual-inversion": "Textual Inversion"}
SCRIPT_ENDINGS = {
    "lora": "train_network",
    "textual-inversion": "train_textual_inversion",
}  # of scripts, where not "train"
DROPS_ZEROS = ("lora", "textual-inversion")
TEMPLATES = {"object template": "use_object_template", "style template": "use_style_template"}
FAMILY_SWITCHES = {
    "sdxl": "sdxl",
    "sdxl_checkbox": "sdxl",
    "flux1_checkbox": "flux",
    "sd3_checkbox": "SD3",
    "anima_checkbox": "anima",
}
TITLED = {"sdxl": "SDXL", "flux": "FLUX.1", "anima": "Anima"}
OTHER_SWITCHES = {"hunyuan_image_checkbox": "HunyuanImage", "lumina_checkbox": "Lumina"}
SWITCHES = {**FAMILY_SWITCHES, **OTHER_SWITCHES}
OF_OTHER_TABS = {key for tab in KOHYA_TABLES["other_tabs"] for key in tab["keys"]}
TELLING = {*SWITCHES, "LoRA_type", "max_resolution", "save_as_bool", "model_list", "optimizer"}


def recognises(settings: JsonMapping) -> bool:
    """Whether this is a file of kohya_ss."""
    telling = TELLING & settings.keys()
    beside = OF_OTHER_TABS & settings.keys()  # which scripts have as flags, too
    return len(telling) >= 2 or bool(telling and beside) or bool({"LoRA_type", *SWITCHES} & settings.keys())


def tab_of(settings: JsonMapping) -> str:
    """The tab that wrote a file, inferred from its keys: a key of TITLES.

    Raises ConfigError for files of tabs that do not train.
    """
    for other in KOHYA_TABLES["other_tabs"]:
        if settings.keys() & set(other["keys"]):
            raise ConfigError(
                "this file of {trainer} is for {what}, which is not trained here: use {trainer}; {advice}",
                trainer=TRAINER, what=other["title"], advice=ONLY)  # fmt: skip
    if settings.keys() & set(KOHYA_TABLES["only_textual_inversion"]):
        return "textual-inversion"
    if {"LoRA_type", "network_dim", "unet_lr"} & settings.keys():
        return "lora"
    if {"image_folder", "train_dir"} & settings.keys():
        return "finetune"
    finetune, dreambooth = (set(KOHYA_TABLES[keys]) for keys in ("only_finetune", "only_dreambooth"))
    return "finetune" if len(settings.keys() & finetune) > len(settings.keys() & dreambooth) else "dreambooth"


def tab_title(settings: JsonMapping) -> str:
    """The title of that tab on kohya_ss's page."""
    return TITLES[tab_of(settings)]


def script_of_kohya_file(settings: JsonMapping) -> str:
    """The script that a file is for. Raises ConfigError for unsupported models."""
    tab = tab_of(settings)
    order = ["sdxl", "flux", "SD3"] if tab == "lora" else ["sdxl", "SD3", "flux"]
    order.append("anima")
    on = {model for switch, model in SWITCHES.items() if is_on(settings.get(switch))}
    on &= {"sdxl"} if tab == "textual-inversion" else on  # that tab has no other switches
    family = next((model for model in [*order, *OTHER_SWITCHES.values()] if model in on), "")
    if not family and str(settings.get("LoRA_type", "")).startswith("Flux1"):
        family = "flux"
    if family not in TITLED:
        title = family or ("Stable Diffusion 2" if is_on(settings.get("v2")) else "Stable Diffusion 1.5")
        none = "" if family or is_on(settings.get("v2")) else " (no box for another model is ticked in it)"
        raise ConfigError(
            "this file of {trainer} is for {title}{none}, which is not trained here: use {trainer}, or import it with "
            "--script sdxl_train_network (or another one) to use its settings for SDXL or FLUX.1", trainer=TRAINER,
            title=title, none=none)  # fmt: skip
    return f"{family}_{SCRIPT_ENDINGS.get(tab, 'train')}"


def read_config(settings: JsonMapping, script: str = "") -> ImportBuilder:
    """Every key of a file -> our values and its outcome. `script` overrides the one of the file.

    Missing keys have the initial values of kohya_ss's page, as when that page loads the file.
    """
    tab = tab_of(settings)
    script = script or script_of_kohya_file(settings)
    starts = page_defaults(tab, script.partition("_")[0], settings)
    filled = {key: starts[key] if value is None and key in starts else value for key, value in settings.items()}
    builder = ImportBuilder(
        {**starts, **filled}, script, f"{TRAINER} ({TITLES[tab]})", absent=frozenset(starts - settings.keys())
    )
    for part in (*OF_TRAINING, *OF_COMPUTING, *OF_FILES):
        part(builder, tab)
    for key in builder.left():
        if key != "additional_parameters":
            _import_key(builder, key, tab)
    if str(settings.get("model_type") or "").casefold() == "chroma" and builder.family == "flux":
        chooses_chroma(builder, "model_type")
        builder.explain("is set by model_type", "apply_t5_attn_mask", "guidance_scale")
        if builder.values.pop("clip_l", None):
            builder.ignore("clip_l", "there is no CLIP-L in Chroma")
    kohya_flags.read_typed_flags(builder)
    return builder


def page_defaults(tab: str, family: str, settings: JsonMapping) -> JsonObject:
    """The initial values of a tab of kohya_ss's page, for keys that a file does not have."""
    values = KOHYA_TABLES["starts"]["any"] | KOHYA_TABLES["starts"][tab]
    if family != "sdxl":
        values.pop("train_text_encoder", None)
    elif tab == "dreambooth":  # older files without these fields have one rate for all parts
        values |= dict.fromkeys(("learning_rate_te1", "learning_rate_te2"), settings.get("learning_rate") or 1e-5)
    if "optimizer" not in settings:  # older files have a switch instead, which sets the optimizer
        values["optimizer"] = None if "use_8bit_adam" in settings else "AdamW"
    if "max_train_steps" not in settings and "epoch" not in settings and "max_train_epochs" not in settings:
        values["max_train_steps"] = 1600
    return {key: value for key, value in values.items() if settings.get(key) is None and value is not None}


# ---- keys that are not simply an option


def _import_kohya_switches(builder: ImportBuilder, tab: str) -> None:
    for key in SWITCHES.keys() & builder.source.keys():
        chosen = is_on(builder.get(key)) and SWITCHES[key] == builder.family
        if chosen:
            builder.change(key, Message("chooses the script: {script}", script=builder.script))
        elif is_on(builder.get(key)):
            builder.ignore(key, Message("the script is {script}", script=builder.script))
        else:
            builder.empty(key)


def _import_kohya_length(builder: ImportBuilder, tab: str) -> None:
    """Epochs take precedence over steps; kohya_ss's own field for epochs applies where no steps are set."""
    steps, epochs, epoch = (builder.number(k) for k in ("max_train_steps", "max_train_epochs", "epoch"))
    if epochs and epochs > 0:
        builder.keep("max_train_epochs", int(epochs))
        for key in ("max_train_steps", "epoch"):
            if key in builder.source:
                builder.ignore(key, "max_train_epochs is set, and wins")
    elif steps and steps > 0:
        builder.keep("max_train_steps")
        if "epoch" in builder.source:
            builder.ignore("epoch", "max_train_steps is set; kohya_ss uses epoch only where it is 0")
    else:
        count = max(1, int(epoch or 1))
        said = "{count} is max_train_epochs: kohya_ss counts the images for it and computes steps"
        if builder.get("dataset_config"):
            said = (
                "{count} is max_train_epochs; kohya_ss itself would train 1600 steps with a dataset_config and no "
                "max_train_steps"
            )
        key = "epoch" if "epoch" in builder.source else "max_train_steps"
        builder.change(key, Message(said, count=count), {"max_train_epochs": count})
    builder.empty("max_train_epochs", "max_train_steps")
    if tab == "finetune" and is_on(builder.get("flip_aug")) and (steps or 0) > 1 and not epochs:
        builder.notes.append("kohya_ss halves max_train_steps of a fine-tune with flip_aug; here it is what is written")


def _import_kohya_warmup(builder: ImportBuilder, tab: str) -> None:
    percent, steps = builder.number("lr_warmup"), builder.number("lr_warmup_steps")
    total = builder.number("max_train_steps")
    schedule = str(builder.get("lr_scheduler_type") or builder.get("lr_scheduler") or "constant")
    none = schedule.split(":")[0] in ("constant", "adafactor") or builder.get("lr_scheduler_type")
    used = "lr_warmup_steps" if steps else "lr_warmup"
    if (percent or steps) and none:
        builder.change(
            used, Message("{schedule} has no warm-up, so there is none", schedule=said_of({"lr_scheduler": schedule}))
        )
    elif steps and steps > 0:
        builder.keep("lr_warmup_steps", int(steps))
        builder.ignore("lr_warmup", "lr_warmup_steps is set, and wins")
    elif percent and percent > 0:
        share: float | int = percent / 100
        if share >= 1:  # a share of 1 would mean one step
            share = int(total) if total else 0.9999
        elif tab == "lora" and builder.get("dataset_config") and total:
            share = round(percent * total / 100)
        said = Message(
            "{percent} % of all steps is {option}",
            percent=f"{percent:g}",
            option=option_values({"lr_warmup_steps": str(share)}),
        )
        builder.change("lr_warmup", said, {"lr_warmup_steps": share})
    builder.empty("lr_warmup", "lr_warmup_steps")


def _import_kohya_rates(builder: ImportBuilder, tab: str) -> None:
    """The learning rates of the parts; 0 means that a part is not trained."""
    if tab == "lora":
        _adapter_rates(builder)
    rates = [builder.number(key) for key in ("learning_rate_te1", "learning_rate_te2")]
    if tab == "dreambooth" and builder.family == "sdxl" and any(rate is not None for rate in rates):
        learns = any((rate or 0) > 0 for rate in rates)
        for key, rate in zip(("learning_rate_te1", "learning_rate_te2"), rates, strict=True):
            if rate is not None:
                template = "{rate}, and both rates are 0: train_text_encoder = false"
                said = f"{rate:g}, train_text_encoder = true" if learns else Message(template, rate=f"{rate:g}")
                builder.change(key, said, {key: rate, "train_text_encoder": learns})


def _adapter_rates(builder: ImportBuilder) -> None:
    unet, text, t5 = (builder.number(key) for key in ("unet_lr", "text_encoder_lr", "t5xxl_lr"))
    if unet:
        builder.keep("unet_lr")
    if text:
        both = [text, t5] if t5 else [text]
        builder.keep("text_encoder_lr", both)
        if t5:
            builder.change("t5xxl_lr", Message("is the second of text_encoder_lr: {rates}", rates=f"{text:g} {t5:g}"))
    elif t5:
        builder.ignore("t5xxl_lr", "text_encoder_lr is 0, and kohya_ss refuses a rate for T5 alone")
    if text == 0 and (unet or 0) > 0:
        builder.change("text_encoder_lr", "0 means network_train_unet_only", {"network_train_unet_only": True})
    if unet == 0 and (text or 0) > 0:
        only = {"network_train_text_encoder_only": True}
        builder.change("unet_lr", "0 means network_train_text_encoder_only", only)
    builder.empty("unet_lr", "text_encoder_lr", "t5xxl_lr")


def _old_names(builder: ImportBuilder, tab: str) -> None:
    old = builder.source.get("use_8bit_adam")
    if "use_8bit_adam" in builder.source:
        if builder.get("optimizer"):
            builder.ignore("use_8bit_adam", "optimizer is set, and wins")
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


def _import_kohya_noise(builder: ImportBuilder, tab: str) -> None:
    """In a LoRA file one switch selects one of two kinds of noise."""
    kind = str(builder.get("noise_offset_type") or "Original")
    if tab == "lora":
        original = ["noise_offset", "noise_offset_random_strength", "adaptive_noise_scale"]
        multires = ["multires_noise_iterations", "multires_noise_discount"]
        for key in original if kind == "Multires" else multires:
            if key in builder.source:
                if key == "multires_noise_discount" and not builder.number("multires_noise_iterations"):
                    builder.empty(key)
                else:
                    builder.ignore(key, said_of({"noise_offset_type": kind}))
        builder.explain(Message("{kind}: only the settings of that noise are taken", kind=kind), "noise_offset_type")
    elif "noise_offset_type" in builder.source:
        said = "it does nothing in this tab: noise_offset and multires_noise_* both count"
        builder.ignore("noise_offset_type", said)
    if "noise_offset" not in builder.outcomes and not builder.number("noise_offset"):
        builder.empty("noise_offset")
        if "adaptive_noise_scale" in builder.source and "adaptive_noise_scale" not in builder.outcomes:
            builder.ignore("adaptive_noise_scale", "it needs a noise_offset, which is 0")


def _import_kohya_precision(builder: ImportBuilder, tab: str) -> None:
    if str(builder.get("mixed_precision")).casefold() == "fp8":
        said = "fp8 is not offered for computing; bf16 is used, and fp8_base saves memory"
        builder.change("mixed_precision", said, {"mixed_precision": "bf16"})


def _import_saved_format(builder: ImportBuilder, tab: str) -> None:
    """The format of the saved file, and the prompts, which are text on kohya_ss's page and a file here."""
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


def _import_folders(builder: ImportBuilder, tab: str) -> None:
    """The folders and files of a fine-tune."""
    if tab != "finetune":
        return
    if builder.get("image_folder"):
        builder.rename("image_folder", "train_data_dir")
    set_by(builder, "enable_bucket", "on, as in every fine-tune of kohya_ss", {"enable_bucket": True})
    folder = str(builder.get("train_dir") or "")
    latents = str(builder.get("use_latent_files") or "Yes").casefold() == "yes"
    used, other = ("latent_metadata_filename", "caption_metadata_filename")[:: 1 if latents else -1]
    if folder:
        name = str(builder.get(used) or ("meta_lat.json" if latents else "meta_cap.json"))
        line = "\\" if "\\" in folder and "/" not in folder else "/"
        path = folder.rstrip("/\\") + line + name
        builder.change(
            "train_dir",
            Message("with {key}: {option}", key=used, option=option_values({"in_json": str(path)})),
            {"in_json": path},
        )
        builder.explain("is the file name of in_json", used)
    builder.explain(Message("chooses {key} for in_json", key=used), "use_latent_files")
    for key in (used, other):
        if key in builder.left():
            builder.ignore(key, said_of({"in_json": used}) if key == other else "there is no train_dir")


def _word(builder: ImportBuilder, tab: str) -> None:
    """The template that replaces captions, one field on kohya_ss's page."""
    if tab == "textual-inversion" and (option := TEMPLATES.get(str(builder.get("template")))):
        builder.change("template", Message("is {option} here", option=option_name(option)), {option: True})
    builder.empty("template")


def _import_kohya_adapter(builder: ImportBuilder, tab: str) -> None:
    if tab == "lora":
        kohya_adapters.read_lora_type(builder)
    if "split_mode" in builder.left():
        builder.ignore("split_mode", "set blocks_to_swap instead; kohya_ss never passes it on")
    if builder.family == "flux":
        given = bool(builder.number("blocks_to_swap")) or "blocks_to_swap" in builder.values
        flat.old_blocks(builder, ("double_blocks_to_swap", "single_blocks_to_swap"), given)


OF_TRAINING = (_import_kohya_switches, _import_kohya_length, _import_kohya_warmup, _import_kohya_rates, _old_names)
OF_COMPUTING = (_import_kohya_attention, _import_kohya_noise, _import_kohya_precision)
OF_FILES = (_import_saved_format, _import_folders, _word, _import_kohya_adapter, kohya_launch.record_launch_keys)


# ---- all other keys


def _import_key(builder: ImportBuilder, key: str, tab: str) -> None:
    """A key that is an option, possibly under another name, or has no equivalent."""
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
    """Why a key has no meaning in this file, or ""."""
    other = next((why for start, why in KOHYA_TABLES["other_models"].items() if key.startswith(start)), "")
    sd3 = "" if tab == "lora" else KOHYA_TABLES["sd3_in_full"].get(key, "")
    if reason := KOHYA_TABLES["ignored"].get(key) or sd3 or other:
        return reason
    if builder.family not in ("flux", "anima") and key in ("blocks_to_swap", "flux_fused_backward_pass"):
        return "kohya_ss has it for FLUX.1 only"
    if tab == "textual-inversion" and key in KOHYA_TABLES["never_for_textual_inversion"]:
        return "kohya_ss never passes it on in this tab"
    if builder.family == "flux" and key in KOHYA_TABLES["never_for_flux"]:
        return "in kohya_ss it is a setting for other models, which a FLUX.1 script never gets"
    others = {"sdxl_": "sdxl", "flux1_": "flux", "anima_": "anima"}
    owner = next((family for start, family in others.items() if key.startswith(start)), builder.family)
    return "" if owner == builder.family else Message("it is for {title}", title=TITLED[owner])
