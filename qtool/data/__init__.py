"""Data: what ``--data`` means (``specs``), where samples come from, and how a caller's own batches are read."""
