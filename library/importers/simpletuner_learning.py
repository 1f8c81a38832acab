"""Import SimpleTuner's adapters, optimizer, schedule, length, loss and timesteps."""

import re
from collections.abc import Mapping

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message
from library.importers.builder import ImportBuilder, describe, is_on, to_number
from library.importers.shared import (
    OWN_LAYERS,
    QUANTIZED,
    equal,
    equivalent_optimizer,
    load_tables,
    optimizer_args,
    say_nearest,
    simplify_name,
    takes_precedence,
    timestep_options,
    train_lycoris,
)

SIMPLETUNER_TABLES = load_tables("simpletuner")
FULL_RANK = 10_000  # a rank of LoKr that stands for whole matrices
OPTIMIZER_PREFIX = re.compile(r"^(optimi|bnb|ao|torch|deepspeed)-")
BETAS = (("optimizer_beta1", "adam_beta1"), ("optimizer_beta2", "adam_beta2"))
DIFFUSION_ALONE = ("snr_gamma", "noise_offset", "offset_noise", "input_perturbation", "use_soft_min_snr")


def _import_simpletuner_network(builder: ImportBuilder) -> None:
    if not builder.adapters:
        return
    kind = str(builder.get("lora_type") or "standard").casefold()
    rank, settings = builder.number("lora_rank") or 16, builder.get("lycoris_config")
    alpha = builder.number("lora_alpha")
    if kind == "lycoris" and isinstance(settings, Mapping):
        _import_simpletuner_lycoris(builder, settings)
        for key in ("lora_rank", "lora_alpha", "lora_dropout"):
            if key in builder.source:
                builder.ignore(key, "lycoris_config says it")
        return
    if kind == "lycoris":
        bypass = ["bypass_mode=True"] if QUANTIZED & builder.values.keys() else []
        values: JsonObject = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr", *bypass]}
        builder.change("lora_type", equal(kind, "lycoris.kohya"), values)
        builder.ignore("lycoris_config", "this file was not found, or cannot be read; say what it says in network_args")
    elif is_on(builder.get("use_dora")):
        train_lycoris(builder, "use_dora", "DoRA", ["algo=lora", "dora_wd=True"])
    if kind == "standard":
        builder.explain("LoRA", "lora_type")
    builder.set_by("lora_alpha", describe({"network_alpha": f"{alpha or rank:g}"}), {"network_alpha": alpha or rank})
    if "lycoris_config" in builder.left():
        builder.ignore("lycoris_config", "lora_type is not lycoris")


def _import_simpletuner_lycoris(builder: ImportBuilder, settings: JsonMapping) -> None:
    """Import the settings of a LyCORIS file."""
    algorithm = str(settings.get("algo") or "lokr")
    rank, alpha = (to_number(settings.get(key)) for key in ("linear_dim", "linear_alpha"))
    arguments = [f"algo={algorithm}"]
    if algorithm == "lokr" and (is_on(settings.get("full_matrix")) or (rank or 0) >= FULL_RANK):
        arguments.append("full_matrix=True")
        rank, alpha = 1, 1
    handled_keys = {"algo", "linear_dim", "linear_alpha", "multiplier", "apply_preset", "full_matrix"}
    arguments += optimizer_args({key: value for key, value in settings.items() if key not in handled_keys})
    if QUANTIZED & builder.values.keys() and not any(argument.startswith("bypass_mode") for argument in arguments):
        arguments.append("bypass_mode=True")
    values: JsonObject = {"network_module": "lycoris.kohya", "network_args": arguments}
    values |= {"network_dim": int(rank)} if rank else {}
    values |= {"network_alpha": alpha} if alpha is not None else {}
    builder.change("lora_type", equal("lycoris", f"lycoris.kohya {' '.join(arguments)}"), {})
    builder.convert("lycoris_config", values)
    if settings.get("apply_preset"):
        builder.notes.append(Message("apply_preset: {text}", text=Message(OWN_LAYERS, names="preset")))


def _import_simpletuner_optimizer(builder: ImportBuilder) -> None:
    their_name = str(builder.get("optimizer"))
    bare = OPTIMIZER_PREFIX.sub("", their_name.casefold())
    near = SIMPLETUNER_TABLES["optimizers"].get(simplify_name(bare), "")
    name, why = (near, say_nearest(their_name, near)) if near else equivalent_optimizer(bare)
    name = "bitsandbytes.optim.AdEMAMix8bit" if simplify_name(bare).startswith("ademamix8") else name
    builder.change("optimizer", why or equal(their_name, name), {"optimizer_type": name})
    settings: JsonObject = {}
    betas = [next((n for key in pair if (n := builder.number(key)) is not None), None) for pair in BETAS]
    if any(beta is not None for beta in betas):
        settings["betas"] = [usual if beta is None else beta for beta, usual in zip(betas, (0.9, 0.999), strict=True)]
    adam = "adam" in name.casefold()
    for key, argument in (("adam_weight_decay", "weight_decay"), ("adam_epsilon", "eps")):
        if adam and builder.number(key) is not None:
            settings[argument] = builder.number(key)
            builder.explain("becomes one of optimizer_args", key)
    config = builder.get("optimizer_config")
    pairs = config.items() if isinstance(config, Mapping) else _parse_settings(config)
    settings |= dict(pairs)
    if arguments := optimizer_args(settings):
        builder.put("optimizer", {"optimizer_args": arguments})
    builder.explain("becomes one of optimizer_args", "optimizer_config", *(key for pair in BETAS for key in pair))
    _import_clipping(builder)


def _import_clipping(builder: ImportBuilder) -> None:
    """Import the limit of the gradients: of their norm, or of each value, which is not limited here."""
    limit, method = builder.number("max_grad_norm"), str(builder.get("grad_clip_method") or "value").casefold()
    if method == "norm" or limit == 0:
        builder.keep("max_grad_norm", limit)
        builder.explain("is part of max_grad_norm", "grad_clip_method")
        return
    template = "it cuts each value of the gradients at {limit}; here max_grad_norm limits their norm, which is 1"
    text = Message(template, limit=f"{limit or 0:g}")
    if builder.given("max_grad_norm"):
        builder.ignore("max_grad_norm", text)
        builder.explain("is part of max_grad_norm", "grad_clip_method")
        return
    builder.empty("max_grad_norm")
    if "grad_clip_method" in builder.source:
        builder.ignore("grad_clip_method", text)
    else:
        builder.notes.append(Message("{trainer}: {text}", trainer="SimpleTuner", text=text))


def _parse_settings(text: object) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in str(text or "").split(","))
    return [(name.strip(), value.strip()) for name, sign, value in pairs if sign]


def _import_simpletuner_schedule(builder: ImportBuilder) -> None:
    name = str(builder.get("lr_scheduler"))
    known_schedules = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
    if warmup := builder.number("lr_warmup_steps"):
        builder.keep("lr_warmup_steps", int(warmup))  # 1.0 would be the whole training
    ours = name if name in known_schedules else "constant"
    ours = "constant_with_warmup" if ours == "constant" and warmup else ours
    free = "schedulefree" in simplify_name(builder.get("optimizer"))
    ours = "constant" if free or (ours == "constant_with_warmup" and not warmup) else ours
    builder.change(
        "lr_scheduler",
        describe({"lr_scheduler": ours}) if name in known_schedules else say_nearest(name, ours),
        {"lr_scheduler": ours},
    )
    for key, option, schedule in (
        ("lr_power", "lr_scheduler_power", "polynomial"),
        ("lr_num_cycles", "lr_scheduler_num_cycles", "cosine_with_restarts"),
    ):
        if ours == schedule and builder.number(key):
            builder.rename(key, option)
        elif key in builder.source:
            builder.ignore(key, Message("lr_scheduler is not {name}", name=schedule))
    if "lr_end" in builder.source:
        builder.ignore("lr_end", "only cosine_with_min_lr ends above 0 here")


def _import_simpletuner_length(builder: ImportBuilder) -> None:
    steps, epochs = builder.number("max_train_steps"), builder.number("num_train_epochs")
    if steps and steps > 0:
        builder.keep("max_train_steps", int(steps))
        builder.ignore("num_train_epochs", takes_precedence("max_train_steps"))
    else:
        builder.assume("num_train_epochs", 1)
        builder.rename("num_train_epochs", "max_train_epochs", int(epochs or 1))
        builder.empty("max_train_steps")
    if is_on(builder.get("use_ema")):
        values: JsonObject = {"ema_decay": builder.number("ema_decay") or 0.995}
        values["ema_device"] = "cpu" if "cpu" in str(builder.get("ema_device") or "cpu") else "gpu"
        values["ema_every_n_steps"] = int(builder.number("ema_update_interval") or 1)
        builder.convert("use_ema", values)
        builder.explain("is a setting of that average", "ema_decay", "ema_device", "ema_update_interval")
    else:
        keys = ("ema_decay", "ema_device", "ema_update_interval", "ema_validation", "ema_warmup_steps")
        builder.explain("use_ema is off", *keys)


def _import_simpletuner_loss(builder: ImportBuilder) -> None:
    kind = str(builder.get("loss_type") or "l2").casefold()
    ours = {"smoothl1": "smooth_l1", "smooth_l1": "smooth_l1", "huber": "huber"}.get(kind, "l2")
    if "loss_type" in builder.source:
        builder.rename("loss_type", "loss_type", ours)
    if not builder.is_unet:
        for key in DIFFUSION_ALONE:
            if key in builder.source:
                builder.ignore(key, "it is for diffusion models, and this model is trained by flow matching")
                builder.values.pop(SIMPLETUNER_TABLES["numbers"].get(key, ""), None)
        return
    if is_on(builder.get("offset_noise")):
        builder.change("offset_noise", "is noise_offset", {"noise_offset": builder.number("noise_offset") or 0.1})
        builder.explain("is noise_offset", "noise_offset")
    elif "noise_offset" in builder.source:
        builder.ignore("noise_offset", "offset_noise is off")


def _import_simpletuner_timesteps(builder: ImportBuilder) -> None:
    keys = (
        "flow_schedule_shift",
        "flow_sigmoid_scale",
        "flow_schedule_auto_shift",
        "flow_use_uniform_schedule",
        "flow_use_beta_schedule",
        "flow_beta_schedule_alpha",
        "flow_beta_schedule_beta",
    )
    if builder.is_unet:
        for key in keys:
            if builder.given(key):
                builder.ignore(key, "this model is trained with all timesteps alike here")
            builder.empty(key)
        return
    shift = builder.number(keys[0])
    by_size, uniform = is_on(builder.get(keys[2])), is_on(builder.get(keys[3]))
    beta = is_on(builder.get(keys[4])) or is_on(builder.get("flux_fast_schedule"))
    shift = None if by_size or shift == 1 else shift
    values = timestep_options(builder, uniform, shift, by_size, builder.number(keys[1]))
    values |= _import_simpletuner_guidance(builder)
    text = describe(values)
    builder.change(keys[0], say_nearest("beta", text) if beta else text, values)
    builder.explain("is part of how timesteps are drawn", *keys[1:])


def _import_simpletuner_guidance(builder: ImportBuilder) -> JsonObject:
    """Return the guidance that a distilled model is trained with: one value, or the middle of a range."""
    keys = ("flux_guidance_mode", "flux_guidance_value", "flux_guidance_min", "flux_guidance_max")
    has_guidance = builder.family == "flux_2" and builder.values.get("model_version") == "dev"
    if builder.get("model_family") == "chroma" or not (has_guidance or builder.family == "flux"):
        builder.explain("there is no guidance in this model", *keys)
        return {}
    mode, constant, least, most = str(builder.get(keys[0]) or "constant"), *map(builder.number, keys[1:])
    middle = ((0.0 if least is None else least) + (4.0 if most is None else most)) / 2
    scale = (1.0 if constant is None else constant) if mode == "constant" else middle
    values: JsonObject = {"guidance_scale": scale}
    text = "is guidance_scale" if mode == "constant" else say_nearest(mode, describe(values))
    builder.explain(text, *keys)
    return values


SIMPLETUNER_IMPORTS = (
    _import_simpletuner_network,
    _import_simpletuner_optimizer,
    _import_simpletuner_schedule,
    _import_simpletuner_length,
    _import_simpletuner_loss,
    _import_simpletuner_timesteps,
)
