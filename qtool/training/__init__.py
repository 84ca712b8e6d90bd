"""Training: one file per memory technique over the loop, and the stage that runs it.

``stage.train`` is the stage, ``techniques.setup`` turns a config into a Setup (see ``qtool.steps.setup``), and
``techniques.TECHNIQUES`` is the list of what there is, one line each.
"""
