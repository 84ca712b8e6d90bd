"""Engines: pt2e and torch.ao, which insert observers and convert as placement says, and the door for eager torch.ao."""
