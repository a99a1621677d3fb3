"""Typed schema, composition and every rule about what cannot be combined."""
