"""Streams of workers: attach, reports in, grants out."""
