"""Blocks of code on pages: which test runs each, and checks that run nothing."""
