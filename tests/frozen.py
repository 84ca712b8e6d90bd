"""What was imported before is no garbage: the server of :mod:`warm` imports this last, for the processes it forks."""

import gc

gc.freeze()
