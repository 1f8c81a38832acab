"""Time a denoising step and an image beside diffusers: full-size models with random weights, on one GPU.

    python -m benchmarks.images --family flux --out flux.jsonl    # minutes; or another family
    python -m benchmarks.images --family flux --ways "diffusers eager" "ours eager"
    python -m benchmarks.images --family flux --tiny              # a quick trial with tiny models, also on a CPU

Each way generates the same images (size, steps, guidance, dtype, text lengths) in a separate process: bf16, one image
at a time, 1024 x 1024. Text is random, as text encoders are not measured. A row, printed as a line of JSON, has:
seconds of the first image (with an empty compiler cache unless --cache names a warm one), of a denoising step and of
the next image, decoding included (medians); peak memory; what was compiled and recorded; and the operations that the
host launched for an image: kernels, graphs, copies, and waits for the GPU.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PROJECT_ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_GIB = 2**30
TIMED_IMAGES = 3  # timed after the first


@dataclass(frozen=True)
class ImageCase:
    """The settings of one image of a family."""

    steps: int
    scale: float  # classifier-free guidance; for an unguided model, the family's neutral value
    theirs: dict[str, float]  # the same for diffusers' pipeline
    guidance: float | None = None  # of guidance-distilled models


IMAGE_CASES = {
    "sdxl": ImageCase(30, 7.5, {"guidance_scale": 7.5}),
    "flux": ImageCase(28, 1.0, {"guidance_scale": 3.5}, guidance=3.5),
    "krea_2": ImageCase(28, 5.5, {"guidance_scale": 4.5}),
    "qwen_image": ImageCase(25, 4.0, {"true_cfg_scale": 4.0}),
    "qwen_image_21": ImageCase(40, 1.0, {}),
    "zimage": ImageCase(25, 4.0, {"guidance_scale": 4.0}),
    "flux_2": ImageCase(50, 4.0, {"guidance_scale": 4.0}),
    "flux_3": ImageCase(50, 4.0, {}),  # diffusers has another kind of pipeline for it
    "anima": ImageCase(30, 4.0, {}),
    "sd15": ImageCase(30, 7.5, {}),
}
PIPELINES_OF_IMAGES = {
    "krea_2": "Krea2Pipeline",
    "qwen_image": "QwenImagePipeline",
    "zimage": "ZImagePipeline",
    "flux_2": "Flux2KleinPipeline",
}
COMPILED_IMAGES = {"sample_compile": "true"}
FP8_PRODUCTS = {"fp8_base": True, "fp8_compute": True}
CACHED_IMAGES = {**COMPILED_IMAGES, "cuda_graphs": "false", "sample_cache": "auto"}
# With random weights `sample_cache = auto` skips an arbitrary share of passes, so the cached ways skip about as many as
# it does of 28 steps of the small trained FLUX.1 (docs/recipes.md).
SKIPPED_SHARE = 0.55
OUR_WAYS: dict[str, dict[str, Any]] = {
    "ours eager": {"sample_compile": "false", "cuda_graphs": "false"},
    "ours recorded": {"sample_compile": "false", "cuda_graphs": "true"},
    "ours compiled": {**COMPILED_IMAGES, "cuda_graphs": "false"},
    "ours compiled, recorded": {**COMPILED_IMAGES, "cuda_graphs": "true"},
    "ours auto": {},
    "ours fp8 products, compiled, recorded": {**COMPILED_IMAGES, "cuda_graphs": "true", **FP8_PRODUCTS},
    "ours compiled, cached": CACHED_IMAGES,
    "ours fp8 products, compiled, cached": {**CACHED_IMAGES, **FP8_PRODUCTS},
    "ours sage, compiled, recorded": {**COMPILED_IMAGES, "cuda_graphs": "true", "sample_attention": "sage"},
    "ours flash4, compiled, recorded": {**COMPILED_IMAGES, "cuda_graphs": "true", "sample_attention": "flash4"},
    "ours in little memory": {**COMPILED_IMAGES, **FP8_PRODUCTS},  # with a preset's swapping and memory limit
}
LITTLE_MEMORY: dict[str, dict[str, Any]] = {  # of the presets lora-8gb and lora-12gb
    "flux": {"blocks_to_swap": 35, "gpu_memory_limit": 8},
    "qwen_image": {"blocks_to_swap": 50, "gpu_memory_limit": 12},
}
# Names of diffusers' ways -> arguments of compile_repeated_blocks; None: not compiled.
THEIR_WAYS: dict[str, dict[str, Any] | None] = {
    "diffusers eager": None,
    "diffusers compiled": {"fullgraph": True},
    "diffusers compiled, max-autotune": {"fullgraph": True, "mode": "max-autotune-no-cudagraphs"},
}
BY_NAME = ("max-autotune", "cached", "sage", "flash4", "little memory")  # run only on request
DEFAULT_WAYS = [name for name in (*THEIR_WAYS, *OUR_WAYS) if not any(part in name for part in BY_NAME)]


# ---- in the child process


@dataclass
class Drawing:
    """A model that is ready to generate."""

    denoise: Callable[[], Any]  # all steps of an image, without decoding
    image: Callable[[], Any]
    running: contextlib.AbstractContextManager[Any]
    describe: Callable[[], dict[str, Any]]


def measure_way(family: str, way: str, tiny: bool, images: int) -> dict[str, Any]:
    """Measure one way; return its row."""
    import torch

    from library.bench import machine
    from library.bench.images import host_operations

    device = machine.choose_device("auto")
    case = IMAGE_CASES[family]
    case = replace(case, steps=3) if tiny else case
    began = time.perf_counter()
    with torch.no_grad():
        if way in OUR_WAYS:
            options = {**OUR_WAYS[way], **(LITTLE_MEMORY[family] if way == "ours in little memory" else {})}
            drawing = prepare_ours(family, options, case, tiny, device)
        else:
            drawing = prepare_theirs(family, THEIR_WAYS[way], case, tiny, device)
        loaded = time.perf_counter() - began
        with drawing.running:
            first = timed(drawing.image, device)
            following = [timed(drawing.image, device) for _ in range(images)]
            denoising = [timed(drawing.denoise, device) for _ in range(images)]
            row: dict[str, Any] = {
                "step_s": round(statistics.median(denoising) / case.steps, 5),
                "next_s": round(statistics.median(following), 4),
                "first_s": round(first, 2),
                "loading_s": round(loaded, 1),
                "steps": case.steps,
                **host_operations(drawing.denoise, device),
            }
    if device.type == "cuda":
        row["gib"] = round(torch.cuda.max_memory_allocated(device) / BYTES_PER_GIB, 2)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / BYTES_PER_GIB, 2)
        row["gpu"] = torch.cuda.get_device_name(device)
    return row | drawing.describe()


def timed(call: Callable[[], Any], device: Any) -> float:
    """Return the seconds until the device has finished the work that `call` launches."""
    import torch

    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def side_of(tiny: bool) -> int:
    return 128 if tiny else 1024


def prepare_ours(family_name: str, options: dict[str, Any], case: ImageCase, tiny: bool, device: Any) -> Drawing:
    """Return this trainer's sampler on its own denoiser."""
    import torch

    from library import families
    from library.bench import random_weights, subjects
    from library.bench.images import TimedImages
    from library.compiler import gpu_memory
    from library.families.base import ModelComponents, SampleRequest
    from library.measuring import timing
    from library.memory.prepare import prepare_denoiser

    script = families.lora_script(family_name)
    subject = subjects.FamilySubject(script, {"mixed_precision": "bf16"}, "tiny" if tiny else "full")
    config = subject.config(options)
    family, dtype = families.family_for(config), torch.bfloat16
    assert subject.random
    denoiser = subject.random.denoiser()
    families.adopt_denoiser(family, denoiser)
    denoiser = random_weights.fill_randomly(denoiser, device, dtype).requires_grad_(False)
    components = ModelComponents(denoiser, subject.vae(device, dtype), {}, {}, {})
    prepare_denoiser(denoiser, family, config, device, ())
    timing.release_memory(device)
    sizes = {"width": side_of(tiny), "height": side_of(tiny), "steps": case.steps}
    request = SampleRequest("a", "b", scale=case.scale, guidance=case.guidance, seed=1, sampler_name="euler", **sizes)
    timed_images = TimedImages(components, family, config, device, request)
    running = contextlib.ExitStack()
    running.enter_context(gpu_memory.held_to(config.memory.gpu_memory_limit, device))
    if "sample_cache" in options:
        running.enter_context(skipped_share(SKIPPED_SHARE))
    running.enter_context(timed_images.running())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # random weights are in 16 bits
    return Drawing(timed_images.denoise, timed_images.image, running, timed_images.facts)


@contextlib.contextmanager
def skipped_share(share: float) -> Iterator[None]:
    """Let a feature cache skip this share of passes within this context; the cost of its decision remains."""
    from library.sampling import feature_cache

    decide = feature_cache._Run.decide

    def decide_by_share(run: Any, change: Any) -> None:
        run.threshold = float("inf") if run.skipped < share * run.passes else 0.0
        decide(run, change)

    feature_cache._Run.decide = decide_by_share  # type: ignore[method-assign]
    try:
        yield
    finally:
        feature_cache._Run.decide = decide  # type: ignore[method-assign]


def prepare_theirs(
    family_name: str, compiling: dict[str, Any] | None, case: ImageCase, tiny: bool, device: Any
) -> Drawing:
    """Return diffusers' pipeline with its own denoiser."""
    import torch

    from library import families
    from library.bench import random_weights, subjects
    from library.compiler import torch_private
    from library.families.shared.random_networks import build_on_meta

    script = families.lora_script(family_name)
    subject = subjects.FamilySubject(script, {"mixed_precision": "bf16"}, "tiny" if tiny else "full")
    module = families.random_module(family_name)
    sizes = families.sizes_of_model(family_name, subject.config({}), not tiny)
    denoiser = build_on_meta(lambda: their_denoiser(family_name, sizes, subject))
    denoiser = random_weights.fill_randomly(denoiser, device, torch.bfloat16).requires_grad_(False)
    pipe = their_pipeline(family_name, denoiser, subject.vae(device, torch.bfloat16))
    pipe.set_progress_bar_config(disable=True)
    family = families.family_for(subject.config({}))
    own = subject.random.denoiser() if subject.random else None
    families.adopt_denoiser(family, own)
    shapes = module.input_shapes(family, own)
    text = {name: tensor.to(torch.bfloat16) for name, tensor in shapes.texts(2, device).items()}
    arguments: dict[str, Any] = {**their_text(family_name, text), **case.theirs}
    side = side_of(tiny)
    arguments |= {"height": side, "width": side, "num_inference_steps": case.steps}
    if compiling is not None:
        settings: Any = torch_private.config_module("dynamo")
        settings.recompile_limit = 64  # only newer PyTorch has this argument of compile
        denoiser.compile_repeated_blocks(**compiling)  # type: ignore[operator]

    def draw(output_type: str) -> Any:
        return pipe(**arguments, output_type=output_type, generator=torch.Generator().manual_seed(1))

    return Drawing(lambda: draw("latent"), lambda: draw("pil"), contextlib.nullcontext(), dict)


def their_denoiser(family: str, sizes: Any, subject: Any) -> Any:
    """Return diffusers' own transformer in these sizes."""
    import diffusers

    from library.families.shared.transformer import rope_axes

    if family == "sdxl":  # its U-Net is diffusers' own
        return subject.random.denoiser()
    heads: dict[str, Any] = {"num_attention_heads": sizes.hidden // sizes.head, "attention_head_dim": sizes.head}
    models: Any = diffusers  # accepts more than its annotations say
    if family in ("flux", "flux_2"):
        heads |= {"num_layers": sizes.double_blocks, "num_single_layers": sizes.single_blocks}
        heads |= {"in_channels": 4 * sizes.channels, "guidance_embeds": sizes.guidance}
    if family == "flux":
        widths = {"joint_attention_dim": sizes.t5xxl, "pooled_projection_dim": sizes.clip_l}
        return models.FluxTransformer2DModel(axes_dims_rope=rope_axes(sizes.head), **widths, **heads)
    if family == "flux_2":
        axes = (sizes.head // 4,) * 4
        return models.Flux2Transformer2DModel(joint_attention_dim=3 * sizes.text, axes_dims_rope=axes, **heads)
    if family == "krea_2":
        from library.families.krea_2 import random

        return models.Krea2Transformer2DModel(**random.diffusers_settings(random.krea_2_shape(sizes)))
    if family == "qwen_image":
        widths = {"in_channels": 4 * sizes.channels, "out_channels": sizes.channels, "joint_attention_dim": sizes.text}
        axes = rope_axes(sizes.head)
        return models.QwenImageTransformer2DModel(num_layers=sizes.blocks, axes_dims_rope=axes, **widths, **heads)
    number = sizes.hidden // sizes.head
    return models.ZImageTransformer2DModel(
        in_channels=sizes.channels,
        dim=sizes.hidden,
        n_layers=sizes.blocks,
        n_refiner_layers=sizes.refiners,
        n_heads=number,
        n_kv_heads=number,
        cap_feat_dim=sizes.text,
        axes_dims=[sizes.head // 4, 3 * sizes.head // 8, 3 * sizes.head // 8],
    )


def their_pipeline(family: str, denoiser: Any, vae: Any) -> Any:
    """Return diffusers' pipeline around a denoiser, without text encoders."""
    import diffusers

    models: Any = diffusers
    if family in ("flux", "zimage"):
        vae.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    if family == "sdxl":
        scheduler = models.EulerDiscreteScheduler(beta_schedule="scaled_linear", timestep_spacing="leading")
        return models.StableDiffusionXLPipeline(vae, None, None, None, None, denoiser, scheduler)
    shift = {"use_dynamic_shifting": True} if family != "zimage" else {"shift": 3.0}
    scheduler = models.FlowMatchEulerDiscreteScheduler(**shift)
    if family == "flux":
        return models.FluxPipeline(scheduler, vae, None, None, None, None, denoiser)
    vae = getattr(vae, "network", vae)  # with frames for a video model
    name = PIPELINES_OF_IMAGES[family]
    return getattr(models, name)(scheduler, vae, None, None, denoiser)


def their_text(family: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return the same random text as arguments of diffusers' pipeline; the first row is the negative prompt."""
    import torch

    if family == "sdxl":
        states = torch.cat((text["hidden_state1"], text["hidden_state2"]), dim=-1)
        return {
            "prompt_embeds": states[1:],
            "negative_prompt_embeds": states[:1],
            "pooled_prompt_embeds": text["pool2"][1:],
            "negative_pooled_prompt_embeds": text["pool2"][:1],
        }
    if family == "flux":
        return {"prompt_embeds": text["t5_out"][1:], "pooled_prompt_embeds": text["l_pooled"][1:]}
    if family == "zimage":
        return {"prompt_embeds": [text["llm_embed"][1]], "negative_prompt_embeds": [text["llm_embed"][0]]}
    states = text[{"flux_2": "ctx_vec", "krea_2": "krea2_vl_embed"}.get(family, "vl_embed")]
    arguments = {"prompt_embeds": states[1:], "negative_prompt_embeds": states[:1]}
    if family in ("krea_2", "qwen_image"):
        kind = torch.bool if family == "krea_2" else torch.long
        mask = torch.ones(states.shape[:2], dtype=kind, device=states.device)
        arguments |= {"prompt_embeds_mask": mask[1:], "negative_prompt_embeds_mask": mask[:1]}
    return arguments


# ---- in the parent process


def run_way(args: argparse.Namespace, way: str, cache: Path) -> dict[str, Any]:
    """Measure one way in a separate process; return its row."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    places["PYTHONPATH"] = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    command = [sys.executable, "-m", "benchmarks.images", "--child", way, "--family", args.family]
    command += ["--pictures", str(args.pictures), *["--tiny"] * args.tiny]
    try:
        done = subprocess.run(command, capture_output=True, env=os.environ | places, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {args.limit:.0f} s"}
    try:
        return json.loads(done.stdout.decode().strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"failed": done.stderr.decode(errors="replace").strip().splitlines()[-3:]}


def main(arguments: list[str] | None = None) -> int:
    """Measure all ways; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=IMAGE_CASES, required=True)
    parser.add_argument("--ways", nargs="+", choices=(*THEIR_WAYS, *OUR_WAYS), default=DEFAULT_WAYS)
    parser.add_argument("--pictures", type=int, default=TIMED_IMAGES, help="number of images to time after the first")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a quick trial, not a measurement")
    parser.add_argument("--limit", type=float, default=500, help="time limit per way in seconds")
    parser.add_argument("--cache", type=Path, help="compiler cache folder; default: an empty one for each way")
    parser.add_argument("--out", type=Path, help="append the rows to this file as JSON lines")
    parser.add_argument("--child", choices=(*THEIR_WAYS, *OUR_WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        print("\n" + json.dumps(measure_way(args.family, args.child, args.tiny, args.pictures)), flush=True)
        os._exit(0)  # compiler threads may not end
    rows = []
    for way in args.ways:
        if way in THEIR_WAYS and not IMAGE_CASES[args.family].theirs:
            continue  # not in diffusers
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            row = {"family": args.family, "way": way, **run_way(args, way, args.cache or Path(folder))}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
