"""What the importers share: chat turns, column mappings, verdict words."""
