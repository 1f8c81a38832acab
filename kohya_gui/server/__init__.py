"""The server of the page: access checks, files and folders, the JSON API, TensorBoard."""
