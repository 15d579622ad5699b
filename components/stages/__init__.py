"""Stages compose components: plain Python, without Prefect, that no component imports."""
