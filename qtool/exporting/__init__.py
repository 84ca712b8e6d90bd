"""Exporting: the quantized form becomes ONNX files that have proven themselves; ``stage`` has the order of the work."""
