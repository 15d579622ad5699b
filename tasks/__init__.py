"""Prefect tasks: one thin call into a component each."""

import logging

# Components log with the standard library. Under Prefect their records belong in the run's log
# (PREFECT_LOGGING_EXTRA_LOGGERS attaches the handler), and Prefect leaves such loggers at the
# root's level, WARNING.
logging.getLogger("components").setLevel(logging.INFO)
