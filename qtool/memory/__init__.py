"""Memory and number formats, known before a run.

``formats`` says what each number format makes of a value and ``arithmetic`` what a model of a given size
costs, both without torch. ``predict`` runs a training step on tensors that have shapes but no storage,
and ``measure`` runs it for real and counts. Which techniques a config means is not known here: the caller
hands over the function that sets them up.
"""
