"""What the daily tasks of benchmarks.tasks share: counting hands, and the files that the page is given."""

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "pretrained_model_name_or_path"
FIRST_CAPTION = "a zorb toy on a red chair"
MENDED = "a zorb toy"
WAIT_SECONDS = 90.0
VISIBLE = "visible=true"


@dataclass
class Hands:
    """What a person does on a page, counted: clicks, and fields that get a value. A choice from a list is one field,
    however often it is clicked, and so is a path with the Enter that ends it."""

    page: Any
    clicks: int = 0
    fields: int = 0
    began: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Count from here: all before was there when the task began."""
        self.clicks = self.fields = 0
        self.began = time.perf_counter()

    def click(self, selector: str) -> None:
        self.hit(self.page.locator(selector))

    def hit(self, found: Any) -> None:
        """Click the first visible element of a locator."""
        self.clicks += 1
        found.locator(VISIBLE).first.click()

    def press(self, name: str) -> None:
        self.hit(self.page.get_by_role("button", name=name, exact=True))

    def tab(self, name: str) -> None:
        self.hit(self.page.get_by_role("tab", name=name, exact=True))

    def type(self, found: Any, value: Any, end: str = "") -> None:
        """Fill the first visible field of a locator; `end` is a key that ends the typing."""
        self.fields += 1
        place = found.locator(VISIBLE).first
        place.fill(str(value))
        if end:
            place.press(end)
        else:
            place.dispatch_event("change")

    def until(self, words: str, where: str = ".message") -> None:
        self.page.locator(f"{where}:visible", has_text=words).first.wait_for()


def await_text(path: Path, text: str) -> None:
    """Wait until a file has this text."""
    limit = time.monotonic() + WAIT_SECONDS
    while path.read_text(encoding="utf-8") != text:
        if time.monotonic() > limit:
            raise TimeoutError(f"{path} has not become {text!r}")
        time.sleep(0.02)


@dataclass(frozen=True)
class Ground:
    """The files that the tasks are done on."""

    folder: Path
    model: Path
    pictures: list[Path]

    def images(self, name: str, count: int = 12) -> Path:
        """A new folder with so many images and their captions, as a person keeps them: no folder names with numbers."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        for number in range(count):
            shutil.copy(self.pictures[number % len(self.pictures)], folder / f"{number:03}.png")
            (folder / f"{number:03}.txt").write_text(f"{FIRST_CAPTION}, number {number}", encoding="utf-8")
        return folder

    def config(self, name: str, images: Path | None = None, **changes: Any) -> Path:
        """A JSON as kohya_ss saves it; its images are in a folder whose name has the repeats."""
        if images is None:
            images = self.images(f"{name}-images/10_zorb toy").parent
        values = {
            "sdxl": True,
            "LoRA_type": "Standard",
            MODEL: str(self.model),
            "train_data_dir": str(images),
            "output_dir": str(self.folder / f"{name}-out"),
            "output_name": name,
            "max_resolution": "256,256",
            "caption_extension": ".txt",
            "max_train_steps": 200,
            "epoch": 1,
            "max_train_epochs": 0,
            "train_batch_size": 1,
            "network_dim": 8,
            "network_alpha": 1,
            "learning_rate": 1e-4,
            "unet_lr": 1e-4,
            "text_encoder_lr": 0,
            "mixed_precision": "no",
            "save_precision": "fp16",
            "optimizer": "AdamW",
            "lr_scheduler": "constant",
            "save_model_as": "safetensors",
            **dict.fromkeys(("network_weights", "resume", "reg_data_dir", "logging_dir", "dataset_config", "vae"), ""),
            **changes,
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(values, indent=2), encoding="utf-8")
        return path
