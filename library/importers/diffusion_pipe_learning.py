"""Import diffusion-pipe's adapters, optimizer, schedule, length and timesteps."""

from library.config.json_types import JsonObject
from library.config.problems import Message
from library.importers.builder import ImportBuilder, describe, is_empty, is_on, to_number
from library.importers.shared import (
    ALL_LAYERS_OF_KREA_2,
    equal,
    equivalent_optimizer,
    load_tables,
    optimizer_args,
    say_nearest,
    simplify_name,
    timestep_options,
    train_lycoris,
)

TRAINER_NAME = "diffusion-pipe"
PIPE_TABLES = load_tables("diffusion_pipe")
FULL_RANK = 100_000  # a rank that stands for whole matrices


def _import_pipe_network(builder: ImportBuilder) -> None:
    if not builder.adapters:
        return
    kind, rank = str(builder.get("adapter.type") or "lora"), builder.number("adapter.rank") or 16
    if kind == "lokr":
        arguments = ["algo=lokr", f"factor={int(builder.number('adapter.decompose_factor') or -1)}"]
        if rank >= FULL_RANK:
            arguments.append("full_matrix=True")
            rank = 1
            builder.change("adapter.rank", "is network_args full_matrix=True here", {"network_dim": 1})
        if dropout := builder.number("adapter.rank_dropout"):
            arguments.append(f"rank_dropout={dropout:g}")
        train_lycoris(builder, "adapter.type", kind, arguments)
        builder.explain("becomes one of network_args", "adapter.decompose_factor", "adapter.rank_dropout")
    else:
        values = {"network_args": [ALL_LAYERS_OF_KREA_2[0]]} if builder.family == "krea_2" else {}
        builder.change("adapter.type", "LoRA" if kind == "lora" else say_nearest(kind, "LoRA"), values)
    text = Message("{trainer} has alpha = rank", trainer=TRAINER_NAME)
    builder.set_by("adapter.alpha", text, {"network_alpha": rank})


def _import_pipe_optimizer(builder: ImportBuilder) -> None:
    their_name = str(builder.get("optimizer.type") or "adamw")
    near = PIPE_TABLES["optimizers"].get(simplify_name(their_name), "")
    name, why = (near, say_nearest(their_name, near)) if near else equivalent_optimizer(their_name)
    if not near and not why and name == their_name and "." not in name:
        name = f"pytorch_optimizer.{name}"  # where it looks up all others
    builder.change("optimizer.type", why or equal(their_name, name), {"optimizer_type": name})
    settings = {key.partition(".")[2]: value for key, value in builder.source.items() if key.startswith("optimizer.")}
    if (rate := to_number(settings.get("lr"))) is not None:
        builder.rename("optimizer.lr", "learning_rate", rate)
    if is_on(settings.get("gradient_release")):
        builder.ignore(
            "optimizer.gradient_release", "fused_backward_pass is for Adafactor on whole models, without accumulation"
        )
    if "beta2_half_life" in settings:
        builder.ignore("optimizer.beta2_half_life", "set the second of betas in optimizer_args")
    arguments_left = {
        key: value
        for key, value in settings.items()
        if key
        not in ("type", "lr", "gradient_release", "beta2_half_life", "stabilize", "cpu_offload", "quant_min_size")
    }
    if why and their_name.casefold() in ("automagic", "genericoptim"):
        shared = ("weight_decay", "betas", "eps")  # arguments that the nearest optimizer has, too
        arguments_left = {key: value for key, value in arguments_left.items() if key in shared}
    if arguments := optimizer_args(arguments_left):
        builder.put("optimizer.type", {"optimizer_args": arguments})
    builder.explain("becomes one of optimizer_args", *(f"optimizer.{key}" for key in arguments_left))
    for key in settings.keys() - arguments_left.keys():
        if f"optimizer.{key}" in builder.left():
            builder.ignore(f"optimizer.{key}", Message("it is for {name}, which is not offered here", name=their_name))


def _import_pipe_rates(builder: ImportBuilder) -> None:
    """Import the separate rates of SDXL's parts."""
    if builder.family != "sdxl":
        return
    base = builder.number("optimizer.lr")
    unet_rate = builder.number("model.unet_lr")
    first, second = (builder.number(f"model.text_encoder_{number}_lr") for number in (1, 2))
    if unet_rate is not None:
        builder.rename("model.unet_lr", "unet_lr" if builder.adapters else "learning_rate", unet_rate)
    if first is None and second is None:
        return
    rates = [base if rate is None else rate for rate in (first, second)]
    keys = [f"model.text_encoder_{number}_lr" for number in (1, 2)]
    if builder.adapters:
        for key in keys:
            builder.explain(describe({"text_encoder_lr": rates}), key)
        builder.values["text_encoder_lr"], builder.keys["text_encoder_lr"] = rates, keys[first is None]
    else:
        for number, (key, rate) in enumerate(zip(keys, rates, strict=True), 1):
            builder.set_by(key, f"learning_rate_te{number} = {rate:g}", {f"learning_rate_te{number}": rate})


def _import_pipe_schedule(builder: ImportBuilder) -> None:
    name, warmup = str(builder.get("lr_scheduler") or "constant"), int(builder.number("warmup_steps") or 0)
    fixed = builder.number("force_constant_lr")
    if fixed is not None:
        builder.change(
            "force_constant_lr",
            describe({"learning_rate": f"{fixed:g}", "lr_scheduler": "constant"}),
            {"learning_rate": fixed},
        )
        name, warmup = "constant", 0
    values: JsonObject = {"lr_scheduler": "constant_with_warmup" if name == "constant" and warmup else name}
    rate = builder.number("optimizer.lr")
    if name == "cosine" and rate and rate > 1e-6:
        values = {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": float(f"{1e-6 / rate:.4g}")}
    builder.derive("lr_scheduler", values)
    if warmup:
        builder.rename("warmup_steps", "lr_warmup_steps", warmup)
    builder.empty("warmup_steps")


def _import_pipe_length(builder: ImportBuilder) -> None:
    """Import the length: epochs, or steps if the file ends the training by them. Intervals in examples become steps."""
    epochs, steps = builder.number("epochs"), builder.number("max_steps")
    if steps:
        builder.rename("max_steps", "max_train_steps", int(steps))
        builder.ignore("epochs", "max_steps ends the training; where so many epochs end before, set max_train_epochs")
    elif epochs:
        builder.rename("epochs", "max_train_epochs", int(epochs))
    batch = _images_per_step(builder) * int(builder.number("gradient_accumulation_steps") or 1)
    if examples := builder.number("save_every_n_examples"):
        interval = max(1, int(examples) // batch)
        builder.convert("save_every_n_examples", {"save_every_n_steps": interval})
    if builder.number("checkpoint_every_n_epochs"):
        builder.ignore("checkpoint_every_n_epochs", "save_state saves a state with each file")
    if share := builder.number("uncond_fraction"):
        builder.rename("uncond_fraction", "caption_dropout_rate", share)
    if c := builder.number("pseudo_huber_c"):
        values = {"loss_type": "huber", "huber_schedule": "constant", "huber_c": c}
        builder.convert("pseudo_huber_c", values)


def _images_per_step(builder: ImportBuilder) -> int:
    """Return images per step and GPU: one number, or of a list by resolution the first one's."""
    value = builder.get("image_micro_batch_size_per_gpu") or builder.get("micro_batch_size_per_gpu") or 1
    while isinstance(value, list):
        value = value[-1] if value and not isinstance(value[-1], list) else (value or [1])[0]
    return max(1, int(to_number(value) or 1))


def _import_pipe_timesteps(builder: ImportBuilder) -> None:
    keys = ("model.timestep_sample_method", "model.sigmoid_scale", "model.shift", "model.flux_shift")
    if builder.family == "sdxl":
        for key in keys:
            builder.ignore(key, "this model is trained with all timesteps alike here")
        return
    method, shift = str(builder.get(keys[0]) or "logit_normal"), builder.number(keys[2])
    by_size = not shift and is_on(builder.get(keys[3]))
    is_same = method == "logit_normal" or (method == "uniform" and not by_size)
    values = timestep_options(builder, method == "uniform", shift, by_size, builder.number(keys[1]))
    if builder.family == "flux" and not is_on(builder.get("model.bypass_guidance_embedding")):
        scale = builder.number("model.guidance")
        values["guidance_scale"] = 1.0 if scale is None else scale
    text = describe(values)
    builder.set_by(keys[0], text if is_same else say_nearest(method, text), values)
    builder.explain("is part of how timesteps are drawn", *keys[1:], "model.guidance")
    for key in keys[1:]:
        if is_empty(builder.source.get(key)) or builder.source.get(key) is False:
            builder.empty(key)


LEARNING_IMPORTS = (
    _import_pipe_network,
    _import_pipe_optimizer,
    _import_pipe_rates,
    _import_pipe_schedule,
    _import_pipe_length,
    _import_pipe_timesteps,
)
