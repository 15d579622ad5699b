def engine_figures():
    return []
