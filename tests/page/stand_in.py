"""A training that only pretends: it keeps a run's record as the real one does, in a tenth of the time.

    python stand_in.py --config_file run.toml

The config's learning_rate says how it goes: 0.5 fails with too little memory, anything else goes well.
"""

import math
import sys
import time
from pathlib import Path

from library.config.schema import read_toml
from library.runs.record import Record

PACE = 0.05  # seconds per step


def main(config_file: str) -> None:
    config = read_toml(config_file)
    total = int(config.get("max_train_steps", 1600))
    asked = ""
    script, name = "flux_train_network", config.get("output_name")
    with Record.start(config, script, config["output_dir"], name, "FLUX.1 LoRA") as record:
        record.plan(total)
        for image in range(1, 13):
            record.phase("caching latents", image, 12)
        record.event("compile", block="DoubleStreamBlock", forward=True, seconds=1.5, reason="", failed="")
        record.event("warning", text="2 images have no caption")
        print("12 images, 1 bucket", flush=True)
        for step in range(1, total + 1):
            if config.get("learning_rate") == 0.5 and step == 5:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.25 GiB")
            if asked := record.stop_requested():
                break
            time.sleep(PACE)
            loss = 0.3 * math.exp(-step / 200) + 0.05 * (step % 3)
            record.step({"step": step, "epoch": 1, "loss": loss, "lr": {"unet": 1e-4}, "s_it": PACE,
                         "eta": (total - step) * PACE})  # fmt: skip
            print(f"step {step}/{total}, loss {loss:.4f}", flush=True)
        if asked == "now":
            return
        result = Path(config["output_dir"]) / f"{name}.safetensors"
        result.write_bytes(b"x" * 2_000_000)
        record.event("saved", file=str(result))


if __name__ == "__main__":
    main(sys.argv[2])
