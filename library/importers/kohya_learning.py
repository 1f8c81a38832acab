"""Import the settings of kohya_ss's tabs that say how long, how fast and with which noise a training learns."""

import math

from library.config.problems import Message, option_name, option_values
from library.importers.builder import ImportBuilder, describe, is_on
from library.importers.shared import takes_precedence

ENCODER_END, OLD_ENCODER_END = "stop_text_encoder_training", "stop_text_encoder_training_pct"


def read_length(builder: ImportBuilder, tab: str) -> None:
    """Import the length: epochs win over steps, and kohya_ss's own field for epochs applies only without steps."""
    steps, epochs, epoch = (builder.number(k) for k in ("max_train_steps", "max_train_epochs", "epoch"))
    if epochs and epochs > 0:
        builder.keep("max_train_epochs", int(epochs))
        for key in ("max_train_steps", "epoch"):
            if key in builder.source:
                builder.ignore(key, takes_precedence("max_train_epochs"))
    elif steps and steps > 0:
        builder.keep("max_train_steps")
        if "epoch" in builder.source:
            builder.ignore("epoch", "max_train_steps is set; kohya_ss uses epoch only if it is 0")
    else:
        count = max(1, int(epoch or 1))
        text = "{count} is max_train_epochs: kohya_ss counts the images for it and computes steps"
        if builder.get("dataset_config"):
            text = (
                "{count} is max_train_epochs; kohya_ss itself would train 1600 steps with a dataset_config and no "
                "max_train_steps"
            )
        key = "epoch" if "epoch" in builder.source else "max_train_steps"
        builder.change(key, Message(text, count=count), {"max_train_epochs": count})
    builder.empty("max_train_epochs", "max_train_steps")
    if tab == "finetune" and is_on(builder.get("flip_aug")) and (steps or 0) > 1 and not epochs:
        builder.notes.append("kohya_ss halves max_train_steps of a fine-tune with flip_aug; here it is what is written")


def read_warmup(builder: ImportBuilder, tab: str) -> None:
    """Import the warm-up: steps win over the percentage, which becomes a share of all steps."""
    percent, steps = builder.number("lr_warmup"), builder.number("lr_warmup_steps")
    total = builder.number("max_train_steps")
    schedule = str(builder.get("lr_scheduler_type") or builder.get("lr_scheduler") or "constant")
    has_no_warmup = schedule.split(":")[0] in ("constant", "adafactor") or builder.get("lr_scheduler_type")
    used = "lr_warmup_steps" if steps else "lr_warmup"
    if (percent or steps) and has_no_warmup:
        builder.change(
            used, Message("{schedule} has no warm-up, so there is none", schedule=describe({"lr_scheduler": schedule}))
        )
    elif steps and steps > 0:
        builder.keep("lr_warmup_steps", int(steps))
        builder.ignore("lr_warmup", takes_precedence("lr_warmup_steps"))
    elif percent and percent > 0:
        share: float | int = percent / 100
        if share >= 1:
            share = 1.0
        elif tab == "lora" and builder.get("dataset_config") and total:
            share = round(percent * total / 100)
        text = Message(
            "{percent}% of all steps is {option}",
            percent=f"{percent:g}",
            option=option_values({"lr_warmup_steps": str(share)}),
        )
        builder.change("lr_warmup", text, {"lr_warmup_steps": share})
    builder.empty("lr_warmup", "lr_warmup_steps")


def read_rates(builder: ImportBuilder, tab: str) -> None:
    """Import the parts' learning rates; 0 means that a part is not trained."""
    if tab == "lora":
        _import_adapter_rates(builder)
    rates = [builder.number(key) for key in ("learning_rate_te1", "learning_rate_te2")]
    if tab == "dreambooth" and builder.family == "sdxl" and any(rate is not None for rate in rates):
        learns = any((rate or 0) > 0 for rate in rates)
        for key, rate in zip(("learning_rate_te1", "learning_rate_te2"), rates, strict=True):
            if rate is not None:
                template = "{rate}, and both rates are 0: train_text_encoder = false"
                text = f"{rate:g}, train_text_encoder = true" if learns else Message(template, rate=f"{rate:g}")
                builder.change(key, text, {key: rate, "train_text_encoder": learns})


def _import_adapter_rates(builder: ImportBuilder) -> None:
    unet, text, t5 = (builder.number(key) for key in ("unet_lr", "text_encoder_lr", "t5xxl_lr"))
    if unet:
        builder.keep("unet_lr")
    if text:
        rates = [text, t5] if t5 else [text]
        builder.keep("text_encoder_lr", rates)
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


def read_noise(builder: ImportBuilder, tab: str) -> None:
    """Import the noise; in a LoRA file one switch selects one of two kinds."""
    kind = str(builder.get("noise_offset_type") or "Original")
    if tab == "lora":
        original = ["noise_offset", "noise_offset_random_strength", "adaptive_noise_scale"]
        multires = ["multires_noise_iterations", "multires_noise_discount"]
        for key in original if kind == "Multires" else multires:
            if key in builder.source:
                if key == "multires_noise_discount" and not builder.number("multires_noise_iterations"):
                    builder.empty(key)
                else:
                    builder.ignore(key, describe({"noise_offset_type": kind}))
        builder.explain(Message("{kind}: only the settings of that noise are taken", kind=kind), "noise_offset_type")
    elif "noise_offset_type" in builder.source:
        text = "it does nothing in this tab: noise_offset and multires_noise_* both count"
        builder.ignore("noise_offset_type", text)
    if "noise_offset" not in builder.outcomes and not builder.number("noise_offset"):
        builder.empty("noise_offset")
        if "adaptive_noise_scale" in builder.source and "adaptive_noise_scale" not in builder.outcomes:
            builder.ignore("adaptive_noise_scale", "it needs a noise_offset, which is 0")


def read_encoder_end(builder: ImportBuilder, tab: str) -> None:
    """Import where the text encoder of DreamBooth stops: a step, or in older files a percentage of all steps."""
    if builder.script != "train_db":
        return
    step, percent = (builder.number(key) for key in (ENCODER_END, OLD_ENCODER_END))
    total = 0 if builder.get("max_train_epochs") else builder.number("max_train_steps") or 0
    if step:
        text = "{step} is a step: the page of kohya_ss calls it a percentage, but its training reads a step"
        builder.change(ENCODER_END, Message(text, step=int(step)), {ENCODER_END: int(step)})
        builder.explain(takes_precedence(ENCODER_END), OLD_ENCODER_END)
    elif percent and (percent < 0 or total):
        end = -1 if percent < 0 else math.ceil(total * percent / 100)
        builder.convert(OLD_ENCODER_END, {ENCODER_END: end})
    elif percent:
        text = "it is a percentage of steps that only the training counts: set {option} to a step"
        builder.ignore(OLD_ENCODER_END, Message(text, option=option_name(ENCODER_END)))
    builder.empty(ENCODER_END, OLD_ENCODER_END)
