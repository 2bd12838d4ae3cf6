"""Plays a run out on a virtual clock: the real schedule, supervision and accounts, with modelled engines and ranks."""
