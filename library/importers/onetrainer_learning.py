"""Import OneTrainer's optimizer, learning rates, schedule, loss, noise, and intervals of saving."""

import math

from library.config.json_types import JsonObject
from library.config.problems import Message, option_name
from library.families import facts_of
from library.importers.builder import ImportBuilder, describe, is_on
from library.importers.onetrainer_model import ENCODER_KEYS, image_part
from library.importers.shared import equal, equivalent_optimizer, load_tables, say_nearest, simplify_name

ONETRAINER_TABLES = load_tables("onetrainer")
NO_BETAS = (
    "adafactor",
    "sgd",
    "sgd8bit",
    "schedulefreesgd",
    "rmsprop",
    "adagrad",
    "dadaptsgd",
    "dadaptadagrad",
    "muon",
)
NO_EPS = ("lion", "lion8bit", "sgd", "sgd8bit", "schedulefreesgd", "dadaptlion", "dadaptsgd", "muon", "tiger")
PAIRS = {"adafactor": ("eps={0},{1}", "1e-30", "0.001"), "came": ("eps1={0} eps2={1}", "1e-30", "1e-16")}


def _import_onetrainer_optimizer(builder: ImportBuilder) -> None:
    their_name = builder.get("optimizer.optimizer")
    name, near = equivalent_optimizer(their_name)
    builder.change("optimizer.optimizer", near or equal(their_name, name), {"optimizer_type": name})
    word = simplify_name(their_name)
    arguments: list[str] = []
    used_keys = [*_append_betas(builder, word, arguments), *_append_eps(builder, word, arguments)]
    defaults = ONETRAINER_TABLES["argument_defaults"].get(word, {})
    for argument in dict.fromkeys(["weight_decay", *defaults, *ONETRAINER_TABLES["arguments"].get(word, ())]):
        key = f"optimizer.{argument}"
        value = builder.get(key) if builder.get(key) is not None else defaults.get(argument)
        is_off = value is False and argument not in defaults and argument != "decouple"
        if value is not None and str(value) != "inf" and not is_off:
            arguments.append(f"{argument}={value}".replace(" ", ""))
            used_keys.append(key)
    if word.startswith("schedulefree") and (steps := builder.number("learning_rate_warmup_steps")):
        arguments.append(f"warmup_steps={_batches_to_steps(builder, steps):g}")
    if arguments:
        builder.put("optimizer.optimizer", {"optimizer_args": arguments})
    builder.explain("becomes one of optimizer_args", *used_keys)
    if is_on(builder.get("optimizer.fused_back_pass")):
        _import_fused_backward(builder, name)


def _append_betas(builder: ImportBuilder, word: str, arguments: list[str]) -> list[str]:
    """Append betas=... from beta1 and the others; a missing one gets its usual value. Return the keys used."""
    count = 3 if word in ("came", "ademamix", "ademamix8bit", "dadaptadan") else 2
    keys = [f"optimizer.beta{i}" for i in (1, 2, 3)[:count]]
    default_betas = {
        "lion": (0.9, 0.99),
        "came": (0.9, 0.999, 0.9999),
        "dadaptadan": (0.98, 0.92, 0.99),
        "prodigyplusschedulefree": (0.9, 0.99),
    }.get(word, (0.9, 0.999, 0.9999))
    values = [builder.number(key) for key in keys]
    if word in NO_BETAS or (not any(value is not None for value in values) and word != "lion8bit"):
        return []
    betas = [default if value is None else value for value, default in zip(values, default_betas, strict=False)]
    arguments.append("betas=" + ",".join(f"{beta:g}" for beta in betas))
    return keys


def _append_eps(builder: ImportBuilder, word: str, arguments: list[str]) -> list[str]:
    values = [builder.get("optimizer.eps"), builder.get("optimizer.eps2")]
    if word in NO_EPS or values == [None, None]:
        return []
    if word in PAIRS:
        text, *default_eps = PAIRS[word]
        pair = [default if value is None else value for value, default in zip(values, default_eps, strict=True)]
        arguments += text.format(*pair).split()
        return ["optimizer.eps", "optimizer.eps2"]
    if values[0] is not None:
        arguments.append(f"eps={values[0]}")
    return ["optimizer.eps"]


def _import_fused_backward(builder: ImportBuilder, name: str) -> None:
    key = "optimizer.fused_back_pass"
    has_no_accumulation = (builder.number("gradient_accumulation_steps") or 1) <= 1
    if name == "Adafactor" and not builder.adapters and has_no_accumulation:
        builder.rename(key, "fused_backward_pass", True)
    else:
        builder.ignore(key, "fused_backward_pass is for Adafactor on whole models, without accumulation")


def _batches_to_steps(builder: ImportBuilder, steps: float) -> float:
    # OneTrainer counts a warm-up in batches; values up to 1 are a share in both trainers.
    return steps if steps <= 1 else max(1, int(steps // max(1, builder.number("gradient_accumulation_steps") or 1)))


def _import_onetrainer_schedule(builder: ImportBuilder) -> None:
    name = str(builder.get("learning_rate_scheduler"))
    warmup = builder.number("learning_rate_warmup_steps") or 0.0
    our_schedule, why = ONETRAINER_TABLES["schedules"].get(name), ""
    is_schedule_free = simplify_name(builder.get("optimizer.optimizer")).find("schedulefree") >= 0
    values: JsonObject = {}
    if is_schedule_free:
        our_schedule, warmup, why = "constant", 0.0, "the optimizer needs no schedule"
    elif name == "CUSTOM" and builder.get("custom_learning_rate_scheduler"):
        our_schedule, warmup = "constant", 0.0
        builder.rename("custom_learning_rate_scheduler", "lr_scheduler_type")
    elif floor := builder.number("learning_rate_min_factor"):
        if name == "COSINE":
            our_schedule, values = "cosine_with_min_lr", {"lr_scheduler_min_lr_ratio": floor}
            builder.change("learning_rate_min_factor", describe({"lr_scheduler_min_lr_ratio": f"{floor:g}"}))
        elif name != "CONSTANT":
            builder.ignore("learning_rate_min_factor", "only cosine_with_min_lr ends above 0 here")
    if our_schedule == "constant" and warmup:
        our_schedule = "constant_with_warmup"
    explanation = (
        equal(name, our_schedule)
        if our_schedule and name != "REX"
        else say_nearest(name, our_schedule := our_schedule or "constant")
    )
    explanation = Message("{what}: {why}", what=explanation, why=why) if why else explanation
    builder.change("learning_rate_scheduler", explanation, {"lr_scheduler": our_schedule, **values})
    if warmup and our_schedule != "adafactor":
        steps = _batches_to_steps(builder, warmup)
        builder.rename("learning_rate_warmup_steps", "lr_warmup_steps", float(steps) if warmup <= 1 else steps)
    else:
        builder.change(
            "learning_rate_warmup_steps", Message("{schedule} has no warm-up, so there is none", schedule=our_schedule)
        )
    cycles = builder.number("learning_rate_cycles")
    if our_schedule == "cosine_with_restarts" and cycles:
        builder.rename("learning_rate_cycles", "lr_scheduler_num_cycles", max(1, round(cycles)))
    else:
        builder.ignore("learning_rate_cycles", Message("{schedule} has no cycles", schedule=our_schedule))


def _rate_factor(builder: ImportBuilder) -> float:
    """Return the factor of learning_rate_scaler for all rates: the square root of the batches or images per step."""
    kind = str(builder.get("learning_rate_scaler"))
    batch = builder.number("batch_size") or 1 if "BATCH" in kind or "BOTH" in kind else 1
    parts = builder.number("gradient_accumulation_steps") or 1 if "GRADIENT" in kind or "BOTH" in kind else 1
    factor = math.sqrt(max(1.0, batch * parts))
    if factor != 1:
        builder.change(
            "learning_rate_scaler",
            Message("{kind}: all learning rates are multiplied by {factor}", kind=kind, factor=f"{factor:.4g}"),
        )
    return factor


def import_rates(builder: ImportBuilder) -> None:
    """Import the trained parts and their learning rates."""
    factor, part = _rate_factor(builder), image_part(builder)

    def rate(key: str) -> float | None:
        value = builder.number(key)
        return None if value is None else float(f"{value * factor:.6g}")

    base, unet_rate = rate("learning_rate") or 0.0, rate(f"{part}.learning_rate")
    is_chroma = builder.get("model_type") == "CHROMA_1"  # T5 is its only text encoder
    several = builder.family in ("sdxl", "flux") and not is_chroma
    learns = [is_on(builder.get(f"{name}.train")) and (several or name == ENCODER_KEYS[0]) for name in ENCODER_KEYS]
    rates = [(base if (r := rate(f"{n}.learning_rate")) is None else r) for n in ENCODER_KEYS]
    rates = [r if is_trained else 0.0 for r, is_trained in zip(rates, learns, strict=True)]
    if builder.adapters:
        builder.change("learning_rate", describe({"learning_rate": f"{base:g}"}), {"learning_rate": base})
        if unet_rate is not None:
            builder.change(f"{part}.learning_rate", describe({"unet_lr": f"{unet_rate:g}"}), {"unet_lr": unet_rate})
        _import_encoder_adapters(builder, learns, rates if several else rates[:1], 0 if is_chroma else 1)
    else:
        rate_here = base if unet_rate is None else unet_rate
        builder.change("learning_rate", describe({"learning_rate": f"{rate_here:g}"}), {"learning_rate": rate_here})
        _import_encoder_training(builder, learns, rates)
    _import_frozen_part(builder, part, learns)
    _note_early_stops(builder, learns)
    for name in (part, *ENCODER_KEYS):
        for key in (f"{name}.train", f"{name}.learning_rate"):
            if key in builder.left() and builder.source[key] is not None:
                builder.change(key, "is part of the learning rates")


def _import_encoder_adapters(builder: ImportBuilder, learns: list[bool], rates: list[float], t5: int) -> None:
    """Import which text encoders get adapters. `t5`: the index of T5 among the text encoders of FLUX.1."""
    key = "text_encoder.train"
    if not any(learns):
        builder.change(key, "no text encoder learns: network_train_unet_only", {"network_train_unet_only": True})
        return
    builder.convert(key, {"text_encoder_lr": rates})
    if builder.family == "flux" and learns[t5]:
        arguments = [*builder.values.get("network_args", ()), "train_t5xxl=True"]
        explanation = "network_args train_t5xxl=True"
        builder.change(f"{ENCODER_KEYS[t5]}.train", explanation, {"network_args": arguments})


def _import_encoder_training(builder: ImportBuilder, learns: list[bool], rates: list[float]) -> None:
    if not builder.is_unet:
        if any(learns):
            template = "text encoders: OneTrainer trains them, too; a {title} fine-tune here trains none"
            builder.notes.append(Message(template, title=facts_of(builder.family).title))
        return
    values: JsonObject = {"train_text_encoder": any(learns)}
    if any(learns):
        names = ("learning_rate_te",) if builder.family == "sd15" else ("learning_rate_te1", "learning_rate_te2")
        values |= dict(zip(names, rates, strict=False))
    builder.change("text_encoder.train", describe({"train_text_encoder": str(any(learns)).lower()}), values)


def _import_frozen_part(builder: ImportBuilder, part: str, learns: list[bool]) -> None:
    key = f"{part}.train"
    if is_on(builder.get(key)):
        return
    if builder.adapters and any(learns):
        builder.change(key, "only text encoders learn", {"network_train_text_encoder_only": True})
    elif builder.family == "sdxl" and any(learns):
        builder.change(key, "block_lr of zeros: only text encoders learn", {"block_lr": ",".join(["0"] * 23)})
    else:
        template = "{key} is off, which leaves nothing to train; the image model is trained here"
        if any(learns):
            template = "{key} is off: OneTrainer trains text encoders alone; the image model is trained here, too"
        builder.notes.append(Message(template, key=key))


def _note_early_stops(builder: ImportBuilder, learns: list[bool]) -> None:
    total = builder.number("epochs") or 0
    for name, is_trained in zip(ENCODER_KEYS, learns, strict=True):
        key, unit = f"{name}.stop_training_after", str(builder.get(f"{name}.stop_training_after_unit") or "EPOCH")
        count = builder.number(key)
        if is_trained and unit != "NEVER" and count and not (unit == "EPOCH" and count >= total):
            template = "{name}: OneTrainer stops after {count} {unit}; here it learns to the end"
            builder.notes.append(Message(template, name=name, count=f"{count:g}", unit=f"{unit.lower()}s"))
        builder.explain("parts learn to the end here", key, f"{key}_unit")


def _import_onetrainer_steps(builder: ImportBuilder) -> None:
    """Import gradient clipping and EMA."""
    clip = builder.number("clip_grad_norm")
    builder.change("clip_grad_norm", describe({"max_grad_norm": f"{clip or 0:g}"}), {"max_grad_norm": clip or 0.0})
    mode = str(builder.get("ema") or "OFF").upper()
    keys = ("ema_decay", "ema_update_step_interval")
    if mode in ("GPU", "CPU"):
        values = {"ema_decay": builder.number("ema_decay"), "ema_device": mode.casefold()}
        values["ema_every_n_steps"] = int(builder.number("ema_update_step_interval") or 1)
        builder.change("ema", Message("an average is kept on the {device}", device=mode), values)
        for key in keys:
            builder.change(key, "is a setting of that average")
    else:
        builder.empty("ema", *keys)


def _import_onetrainer_loss(builder: ImportBuilder) -> None:
    kind, strength = str(builder.get("loss_weight_fn")), builder.number("loss_weight_strength")
    gamma = builder.number("min_snr_gamma")
    if gamma and not builder.given("loss_weight_fn"):
        builder.keep("min_snr_gamma", gamma)
    elif kind == "MIN_SNR_GAMMA":
        builder.change("loss_weight_fn", describe({"min_snr_gamma": f"{strength:g}"}), {"min_snr_gamma": strength})
    elif kind == "DEBIASED_ESTIMATION":
        builder.change("loss_weight_fn", "debiased_estimation_loss", {"debiased_estimation_loss": True})
    elif kind not in ("CONSTANT", "SIGMA"):
        builder.ignore("loss_weight_fn", say_nearest(kind, "min_snr_gamma = 5"))
    elif kind == "SIGMA":
        explanation = "timesteps are weighed as in sd3, which needs sigma_scaled predictions; all count the same"
        builder.ignore("loss_weight_fn", explanation)
    builder.empty("loss_weight_fn", "loss_weight_strength", "min_snr_gamma")
    strengths = {key: builder.number(f"{key}_strength") or 0.0 for key in ("mse", "mae", "log_cosh", "huber")}
    main_loss = max(strengths, key=lambda key: strengths[key]) if any(strengths.values()) else "mse"
    values: JsonObject = {
        "mse": {},
        "mae": {"loss_type": "l1"},
        "log_cosh": {"loss_type": "smooth_l1"},
        "huber": {"loss_type": "huber"},
    }[main_loss]
    if main_loss in ("huber", "log_cosh"):
        values |= {
            "huber_schedule": "constant",
            "huber_c": builder.number("huber_delta") if main_loss == "huber" else 1.0,
        }
    count = sum(map(bool, strengths.values()))
    explanation = describe({"loss_type": values.get("loss_type", "l2")})
    for key in strengths:
        if key != main_loss:
            builder.ignore(f"{key}_strength", "one loss is used here, the one with the largest strength")
    if count > 1:
        explanation = Message("{option}, the largest of {count} that are mixed", option=explanation, count=count)
    if values or count > 1:
        builder.change(f"{main_loss}_strength", explanation, values)
    builder.empty("mse_strength", "vb_loss_strength")
    builder.explain(
        Message("is {option} here", option=option_name("huber_c")) if main_loss == "huber" else "only huber has it",
        "huber_delta",
    )


def _import_onetrainer_intervals(builder: ImportBuilder) -> None:
    """Import intervals of saving, which are steps or epochs here, or minutes for states."""
    unit, count = str(builder.get("save_every_unit") or "NEVER"), builder.number("save_every")
    if unit in ("STEP", "EPOCH") and count:
        name = f"save_every_n_{unit.casefold()}s"
        builder.convert("save_every", {name: int(count)})
        builder.explain("is the unit of save_every", "save_every_unit")
        if unit == "STEP" and (begin := builder.number("save_skip_first")):
            builder.change("save_skip_first", f"save_from_step = {int(begin)}", {"save_from_step": int(begin)})
    elif unit not in ("NEVER", "ALWAYS") and count:
        for key in ("save_every", "save_every_unit"):
            builder.ignore(key, "files are saved every N epochs or steps here: set save_every_n_epochs")
    builder.empty("save_every", "save_every_unit", "save_skip_first")
    unit, count = str(builder.get("backup_after_unit")), builder.number("backup_after")
    minutes = {"SECOND": 1 / 60, "MINUTE": 1.0, "HOUR": 60.0}.get(unit)
    if minutes and count:
        interval = max(1, round(count * minutes))
        explanation = describe({"save_state_every_n_minutes": interval})
        builder.change("backup_after", explanation, {"save_state_every_n_minutes": interval})
    elif unit in ("STEP", "EPOCH") and count:
        builder.ignore("backup_after", "save_state saves a state with each file")
    builder.empty("backup_after")
    keys = ("backup_after_unit", "rolling_backup", "rolling_backup_count", "backup_before_save")
    builder.explain("belongs to the backups, which are states here", *keys)


def _import_onetrainer_noise(builder: ImportBuilder) -> None:
    for key, option in (("offset_noise_weight", "noise_offset"), ("perturbation_noise_weight", "ip_noise_gamma")):
        if builder.number(key):
            builder.rename(key, option)
        builder.empty(key)
    for key, option, off in (("min_noising_strength", "min_timestep", 0), ("max_noising_strength", "max_timestep", 1)):
        share = builder.number(key)
        if share is not None and share != off:
            builder.convert(key, {option: round(share * 1000)})
        builder.empty(key)


LEARNING_IMPORTS = (
    _import_onetrainer_optimizer,
    _import_onetrainer_schedule,
    import_rates,
    _import_onetrainer_steps,
    _import_onetrainer_loss,
    _import_onetrainer_intervals,
    _import_onetrainer_noise,
)
