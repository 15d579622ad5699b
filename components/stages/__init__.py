"""Stages compose components into the steps of the pipeline: plain Python, called by flows, tasks
and command lines.
"""
