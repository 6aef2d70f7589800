"""The places, users and environments with which ranks start."""
