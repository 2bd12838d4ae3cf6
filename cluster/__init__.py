"""Decides where processes live and moves things between them."""
