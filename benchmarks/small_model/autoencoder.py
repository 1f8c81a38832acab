"""Train the small autoencoder of a family for a number of seconds, into `vae.safetensors` with diffusers' names.

Loss: L1 and squared error of pixels and L1 of the differences between neighbours, with a small KL term. The decoder
gets slightly noised latents, as a denoiser's are never exact. Before the last part of the training the latents are
scaled and shifted to what the family's code expects: unit variance after its own scale.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.small_model import networks
from library.files import write_atomic

RATE = 1e-3
SCALED_AFTER = 0.8  # share of the time; after it, whole images
CROP = 64  # pixels: a quarter of the work, and convolutions learn the same
KL_WEIGHT = 1e-6
LATENT_NOISE = 0.1  # of the latents' standard deviation, added before decoding


def read_pictures(folder: Path) -> Tensor:
    """Return all images of a folder, uint8 [N, 3, H, W]."""
    paths = sorted(folder.glob("*.png"))
    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(lambda path: np.asarray(Image.open(path).convert("RGB")), paths))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def loss_of(vae: Any, pixels: Tensor) -> Tensor:
    """Return the loss of reconstructing pixels [B, 3, H, W] in -1..1."""
    posterior = vae.encode(pixels).latent_dist
    latents = posterior.sample()
    latents = latents + LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)
    decoded = vae.decode(latents).sample.float()
    wrong = decoded - pixels
    edges = wrong.diff(dim=2).abs().mean() + wrong.diff(dim=3).abs().mean()
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).float().mean()
    return wrong.abs().mean() + 0.3 * (wrong**2).mean() + 0.5 * edges + KL_WEIGHT * kl


@torch.no_grad()
def scale_latents(vae: Any, pixels: Tensor, kind: networks.LatentScale) -> None:
    """Give the latents the mean and deviation that the family's scale and shift map to 0 and 1."""
    latents = torch.cat([vae.encode(part).latent_dist.mean.float() for part in pixels.split(64)])
    mean = latents.mean((0, 2, 3))
    # One factor for all channels, so that weak channels stay small and the denoiser spends little on them.
    deviation = (latents - mean[:, None, None]).square().mean().sqrt()
    factor = (1 / kind.scale / deviation).expand(len(mean)).clone()
    offset = kind.shift - mean * factor
    before = vae.quant_conv if vae.quant_conv is not None else vae.encoder.conv_out
    after = vae.post_quant_conv if vae.post_quant_conv is not None else vae.decoder.conv_in
    channels = len(factor)
    before.weight[:channels] *= factor[:, None, None, None]
    before.bias[:channels] = before.bias[:channels] * factor + offset
    before.bias[channels:] += 2 * factor.log()
    after.bias -= torch.einsum("oihw,i->o", after.weight, offset / factor)  # zero-padded borders adapt later
    after.weight /= factor[None, :, None, None]


def train_autoencoder(vae: Any, pictures: Tensor, kind: networks.LatentScale, seconds: float, batch: int) -> None:
    """Train in place with AdamW, a warm-up and a linearly falling rate."""
    device = pictures.device
    optimizer = torch.optim.AdamW(vae.parameters(), RATE, weight_decay=0.0, fused=device.type == "cuda")
    began, step, scaled = time.monotonic(), 0, False
    while (done := (time.monotonic() - began) / seconds) < 1 or not step:
        if done > SCALED_AFTER and not scaled:
            scaled = True
            scale_latents(vae, scale_pixels(pictures[:: len(pictures) // 2000 + 1]), kind)
            optimizer = torch.optim.AdamW(vae.parameters(), RATE, weight_decay=0.0, fused=device.type == "cuda")
        rate = RATE * min(1, (step + 1) / 200) * max(0.02, 1 - done)
        optimizer.param_groups[0]["lr"] = rate
        chosen = pictures[torch.randint(len(pictures), (batch,), device=device)]
        loss = loss_of(vae, scale_pixels(chosen if scaled else crop(chosen)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}, {100 * done:.0f} %, loss {loss.item():.4f}", flush=True)
        step += 1
    print(f"{step} steps of {batch}")


def crop(pictures: Tensor) -> Tensor:
    top, left = (int(torch.randint(side - CROP + 1, ())) for side in pictures.shape[-2:])
    return pictures[..., top : top + CROP, left : left + CROP]


def scale_pixels(pictures: Tensor) -> Tensor:
    """uint8 -> -1..1"""
    return pictures.float() / 127.5 - 1


@torch.no_grad()
def report_quality(vae: Any, pictures: Tensor, kind: networks.LatentScale, sheet: Path) -> None:
    """Print statistics of held-out latents and reconstructions, and draw some reconstructions."""
    pixels = scale_pixels(pictures[:256])
    latents = vae.encode(pixels).latent_dist.mean
    decoded = vae.decode(latents).sample.clamp(-1, 1)
    scaled = (latents - kind.shift) * kind.scale
    psnr = -10 * torch.log10(((decoded - pixels) ** 2).mean((1, 2, 3)) / 4)
    print(f"held out: PSNR {psnr.mean():.2f} dB; latents {scaled.mean():.3f} +- {scaled.std():.3f}")
    rows = [torch.cat([*part[:12]], 2) for part in (pixels, decoded)]
    grid = ((torch.cat(rows, 1) + 1) * 127.5).byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(grid).save(sheet)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small autoencoder.")
    parser.add_argument("family", choices=[*networks.AUTOENCODERS])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("folder", type=Path, help="folder for vae.safetensors and vae.png")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(networks.SEED)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device, kind = torch.device("cuda" if torch.cuda.is_available() else "cpu"), networks.AUTOENCODERS[args.family]
    vae = kind.vae().to_empty(device=device)
    vae.load_state_dict(networks.random_of(vae.state_dict(), 9))
    vae = vae.to(memory_format=torch.channels_last)
    train_autoencoder(vae, read_pictures(args.pictures / "train").to(device), kind, args.seconds, args.batch)
    args.folder.mkdir(parents=True, exist_ok=True)
    report_quality(vae.eval(), read_pictures(args.pictures / "held_out").to(device), kind, args.folder / "vae.png")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in vae.state_dict().items()}
    write_atomic(args.folder / "vae.safetensors", lambda temporary: save_file(tensors, temporary, {"format": "pt"}))


if __name__ == "__main__":
    main()
