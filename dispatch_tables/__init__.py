"""Dispatch tables as package data, installed as `fastkernels._tables`."""
