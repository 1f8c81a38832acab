"""Parts that several families share: text encoders, tokenizers, the autoencoder, files of weights, the hub."""
