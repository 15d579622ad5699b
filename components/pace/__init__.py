"""How long a recipe takes on this machine, and how much of it fits into a given time. Pure but for
the probe.
"""
