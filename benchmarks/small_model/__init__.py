"""Pretrain small models of the FLUX.1 and SDXL architectures on emoji, with this trainer's own scripts.

    python -m benchmarks.small_model.draw FOLDER                             # all emoji, in FOLDER/emoji.zip
    python -m benchmarks.small_model.data FOLDER                             # images with captions
    python -m benchmarks.small_model.autoencoder FAMILY FOLDER/pictures VAE --seconds 250
    python -m benchmarks.small_model.networks FAMILY MODEL --emoji FOLDER --autoencoder VAE/vae.safetensors
    python -m benchmarks.small_model.pretrain FAMILY MODEL FOLDER/pictures/train --steps 9000
    python -m benchmarks.small_model.finish FAMILY MODEL/trained/FAMILY.safetensors MODEL OUT

    python -m benchmarks.small_model.ship OUT-FOLDER                         # into library/demo/small_models

library/demo/small_models/README.md describes how the bundled models were trained. A step of 512 images takes 0.05 s on
an H200, which is idle for two thirds of it: collating so many small latents in Python takes longer. On two GPUs, with
`accelerate launch --multi_gpu`, the same TOML and half the batch on each, it takes 0.022 s. Longer training helps.
"""
