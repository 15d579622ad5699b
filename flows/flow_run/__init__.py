"""What belongs to a flow run as Prefect keeps it: its log, its artifacts, its task runner."""
