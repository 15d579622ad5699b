"""The command `dspark`: one place to start, watch, gate and look at everything."""
