"""Quantization: a float model becomes the one quantized form (``qtool.form``); ``stage`` has the order."""
