"""Attacks of /docs/threat-model.md, attempted from inside."""
