"""Sample images and validation while a training runs, and stopping early by them."""
