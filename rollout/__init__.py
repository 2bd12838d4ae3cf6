"""Turns prompts into scored groups."""
