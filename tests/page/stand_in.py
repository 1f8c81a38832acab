"""A stand-in for a training: it writes the same record as a real run, in a tenth of the time.

    python stand_in.py --config_file run.toml

A learning_rate of 0.5 makes it fail with too little memory; with any other it succeeds. It does not end while its
output folder has a file called held.
"""

import json
import math
import sys
import time
from pathlib import Path

from library.config.formats import read_toml
from library.config.problems import Message
from library.runs.record import Record

PACE = 0.05  # seconds per step


def main(config_file: str) -> None:
    config = read_toml(config_file)
    total = int(config.get("max_train_steps", 1600))
    stop_kind, first = "", begin(config)
    script, name = "flux_train_network", config.get("output_name")
    settings = {"sample": {"sample_prompts": config.get("sample_prompts")}, "steps": {"resume": config.get("resume")}}
    with Record.start(settings, script, config["output_dir"], name, "FLUX.1 LoRA") as record:
        record.plan(total)
        for image in range(1, 13):
            record.phase(Message("caching latents"), image, 12)
        record.event(
            "compile",
            block="DoubleStreamBlock",
            forward=True,
            seconds=1.5,
            reason="",
            failed="",
            total=1.5,
            cache_hits=3,
        )
        record.event("warning", text="2 images have no caption")
        print("12 images, 1 bucket", flush=True)
        for step in range(first, total + 1):
            if config.get("learning_rate") == 0.5 and step == 5:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.25 GiB")
            if stop_kind := record.stop_requested():
                break
            time.sleep(PACE)
            loss = 0.3 * math.exp(-step / 200) + 0.05 * (step % 3)
            record.step(
                {
                    "step": step,
                    "epoch": 1,
                    "loss": loss,
                    "lr": {"unet": 1e-4},
                    "s_it": PACE,
                    "grad_norm": 0.5,
                    "eta": (total - step) * PACE,
                    "data_s": 0.002,
                    "transfer_s": 0.001,
                    "compute_s": 0.047,
                    "compile/saved_seconds": 0.4 * step,
                }
            )
            print(f"step {step}/{total}, loss {loss:.4f}", flush=True)
            grant(record, config, step)
        while (Path(config["output_dir"]) / "held").exists():
            time.sleep(PACE)
        result = Path(config["output_dir"]) / f"{name}.safetensors"
        result.write_bytes(b"x" * 2_000_000)
        record.event("saved", file=str(result), step=step, bytes=2_000_000, ok=True, text="it loads: all 64 tensors")
        if stop_kind:
            state(record, result.with_name(f"{name}-state"), step - 1)


def begin(config: dict) -> int:
    """The first step: 1, or the one after the state's."""
    if not config.get("resume"):
        return 1
    return json.loads((Path(config["resume"]) / "train_state.json").read_text())["current_step"] + 1


def grant(record: Record, config: dict, step: int) -> None:
    """Fulfil the requests made while it runs: samples, and saved states."""
    for request in record.requests():
        if request == "save":
            name = f"{config['output_name']}-step{step:08d}-state"
            state(record, Path(config["output_dir"]) / name, step)
            continue
        from PIL import Image

        for number, prompt in enumerate(("a red fox in the snow", "the same fox, asleep")):
            place = Path(config["output_dir"]) / "sample" / f"{config['output_name']}_{step:06d}_{number:02d}_7.png"
            place.parent.mkdir(exist_ok=True)
            Image.radial_gradient("L").resize((256, 256 + 64 * number)).point(lambda v: (v + 7 * step) % 256).save(
                place
            )
            record.event("sample", file=str(place), step=step, prompt=prompt, number=number)


def state(record: Record, folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train_state.json").write_text(json.dumps({"current_step": step}), encoding="utf-8")
    record.event("saved", file=str(folder), step=step, bytes=1_000_000)


if __name__ == "__main__":
    main(sys.argv[2])
