"""The text-to-image world: scenes of objects and glyphs on a lattice, rendered and verified."""
