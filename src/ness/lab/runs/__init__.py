"""Runs: settings, folders, records, tables of runs."""
