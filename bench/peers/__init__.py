"""Comparisons with other people's libraries, each in an environment of its own."""
