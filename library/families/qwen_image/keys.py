"""Names of Qwen-Image's tensors, in the layouts that its files have."""

from collections.abc import Mapping

from library.families.shared.weights import renamed

# Single file (Wan 2.1) -> diffusers, inside a residual block and inside an attention of the VAE.
RESIDUAL = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
            "shortcut": "conv_shortcut"}  # fmt: skip
MIDDLE = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")


def vae(names: Mapping[str, object]) -> dict[str, str]:
    """Keys of a VAE's file in either layout -> {diffusers' key: key in the file}."""
    if "decoder.conv1.weight" not in names:
        return {name: name for name in names}
    # Resnets of a level, and the layer after them that changes the size; the encoder has one resnet less.
    middle = {f"{side}.middle.{n}": f"{side}.{new}" for side in ("encoder", "decoder") for n, new in enumerate(MIDDLE)}
    ends = {f"{side}.{old}": f"{side}.{new}" for side in ("encoder", "decoder")
            for old, new in (("conv1", "conv_in"), ("head.0", "norm_out"), ("head.2", "conv_out"))}  # fmt: skip
    known = {"conv1": "quant_conv", "conv2": "post_quant_conv", **middle, **ends}
    samplers = sorted(
        {int(name.split(".")[2]) for name in names if name.startswith("decoder.upsamples.") and ".resample." in name}
    )
    each = samplers[0] + 1 if samplers else 4
    for name in names:
        side, kind, number, *_ = (*name.split("."), "", "", "")
        if kind == "downsamples":
            known[f"{side}.{kind}.{number}"] = f"{side}.down_blocks.{number}"
        elif kind == "upsamples":
            level, place = divmod(int(number), each)
            where = "upsamplers.0" if int(number) in samplers else f"resnets.{place}"
            known[f"{side}.{kind}.{number}"] = f"{side}.up_blocks.{level}.{where}"
    found = {}
    for name in names:
        new = renamed(name, known)
        for old, plain in RESIDUAL.items():
            new = new.replace(f".{old}.", f".{plain}.")
        found[new] = name
    return found
