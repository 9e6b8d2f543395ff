"""Foreign formats, one file per family: rows as records. A format reads no files and validates nothing."""
