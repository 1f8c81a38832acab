"""Pretrain small models of FLUX.1's and SDXL's kind on emoji, with this trainer's own scripts.

    python -m benchmarks.small_model.draw FOLDER                             # all emoji, in FOLDER/emoji.zip
    python -m benchmarks.small_model.data FOLDER                             # pictures with captions
    python -m benchmarks.small_model.autoencoder FAMILY FOLDER/pictures VAE --seconds 250
    python -m benchmarks.small_model.networks FAMILY MODEL --emoji FOLDER --autoencoder VAE/vae.safetensors
    python -m benchmarks.small_model.pretrain FAMILY MODEL FOLDER/pictures/train --steps 9000
    python -m benchmarks.small_model.finish FAMILY MODEL/trained/FAMILY.safetensors MODEL OUT

One H200, 2026-11-27, with two more single blocks in FLUX.1, two more transformer blocks in SDXL's last level and
autoencoders of 3.2 million weights, both families side by side: the autoencoders reached 31.4 and 28.8 dB on held-out
pictures after 250 s; 9,000 steps of 512 pictures took 12 minutes (0.08 s each, bound by the processor) and ended at a
loss of 0.212 (FLUX.1) and 0.034 (SDXL). SDXL then draws a red apple, a rocket and a cup as such; FLUX.1's apple, cat
and cactus can be recognised, its finer shapes cannot yet.
"""
