"""The server behind the page: who may ask, files and folders, its answers as JSON, TensorBoard."""
