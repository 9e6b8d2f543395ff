"""Metrics and where they are written: the table of metrics, the writers, the progress line, the dashboard."""
