"""Models: what ``--model`` and ``--weights`` mean (``specs``), those built in, and weights read into their places."""
