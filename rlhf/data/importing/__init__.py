"""The import job: rows to cleaned, split records in Arrow, every row accounted for."""
