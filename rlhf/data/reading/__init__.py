"""Bytes to rows: text lines, JSON, tables, spreadsheets."""
