"""Quantization-aware training: fine-tuning through fake-quantizers, towards labels or the float model."""
