"""Shared by the importers: chat turns, column mappings, verdict words."""
