"""Captured graphs: what ``torch.export`` makes of a model, how it is stored, and what its operators mean."""
