"""Codecs between Quire's types and its protos."""
