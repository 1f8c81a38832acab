"""What learns: the whole model, or adapters inside it."""
