"""What a run tells: the table of metrics, the writers, the progress line, the report. It trains nothing."""
