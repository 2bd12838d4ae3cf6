"""Turns scored groups into new weights."""
