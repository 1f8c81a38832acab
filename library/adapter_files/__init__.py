"""Files of adapters: their names and formats, read and written tensor by tensor, and checked."""
